"""Deployment files at random: each ends in a typed error with its line, or in a monitor that does what it says."""

import random
import re
from collections import Counter

import jsonschema
import yaml

from probemon import DynamicProbeManager
from probemon.errors import DeploymentError, PackError
from probemon.ops.deployment.cost import cost_of
from probemon.ops.deployment.deployment import Deployment, schema

# Beside what the file has: every other key that it may have.
MORE = """
include: [c0, c1, c2, c3, c9, c11]
exclude: [c26]
depth:
  c0: 6
budget:
  ms: 2.5
  share: 0.1
breaker:
  errors: 2
  within: 30
metrics:
  concepts: [c9]
"""
ODD = (
    "null", "[]", "{}", "-1", "0", "3", "0.5", "1e400", "'*'", "yes", "~", "[[", "- a", '"\\ud800"', "c9", "[c3]",
    "stop", "!!python/object:os.system", "\0", "{ms: 1}", "9" * 400, "[c1, c1]", "''", "2026-01-01", "0x10", "1_000",
)  # fmt: skip
ERROR = re.compile(r"odd\.yaml(, line \d+| is not YAML| has)")


def at_random(folder, text, n, seed=0):
    """Read `n` files made of lines of `text`; return how many were read, and how many ended in which error."""
    checked = jsonschema.Draft202012Validator(schema())
    chance, lines, ends = random.Random(seed), (text + MORE).splitlines(), Counter()
    path = folder / "odd.yaml"
    for _ in range(n):
        path.write_text("\n".join(spoilt(lines, chance)))
        try:
            deployment = Deployment.read(path)
            pack = deployment.open_packs()
            cost_of(deployment, pack)
            rules, metrics = deployment.rules(pack), deployment.metrics(pack)
        except (DeploymentError, PackError) as error:
            assert ERROR.search(str(error)), error
            ends[type(error).__name__] += 1
            continue
        ends["read"] += 1
        content = yaml.safe_load(path.read_text())
        assert checked.is_valid(deployment.content) and content == deployment.content
        assert [told(rule) for rule in rules] == expected(content, pack), content["rules"]
        assert (metrics is None) == ("metrics" not in content)
        if ends["read"] % 50 == 1:  # takes longest: the manager whole
            manager = DynamicProbeManager.from_deployment(path, strategy="descent")
            plan, cascade = manager.plan, content.get("cascade", {})
            assert cascade.get("keep_top_k", manager.config.keep_top_k) == manager.config.keep_top_k
            assert all(plan.always[pack.find(concept)] for concept in content.get("always_on", ()))
            for concept in content.get("exclude", ()):
                assert not any(plan.watched[probe] for probe in pack.find_all([concept]))
            assert manager.audit_rate == content.get("audit_rate", 0)
            for name in ("budget", "breaker"):
                stated = getattr(manager.deployment, name)
                assert (stated is None) == (name not in content)
                assert all(getattr(stated, key) == value for key, value in content.get(name, {}).items())
    return ends


def spoilt(lines, chance):
    """Take lines away, double, move, replace or indent them; leave some as they are."""
    some = list(lines)
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(some))
        what = chance.randrange(5)
        if what == 0:
            del some[at]
        elif what == 1:
            some.insert(chance.randrange(len(some)), some[at])
        elif what == 2:
            some[at] = f"{some[at].partition(':')[0]}: {chance.choice(ODD)}"
        elif what == 3:
            some[at] = " " * chance.randrange(5) + some[at].strip()
        else:
            cut = chance.randrange(len(some[at]) + 1)
            some[at] = some[at][:cut] + chance.choice((*ODD, "#", ":", '"', "&a", "*a", "|")) + some[at][cut:]
    return some


def told(rule):
    return rule.probe, round(rule.above, 6), rule.for_tokens, str(rule.aggregator), rule.action, rule.on_blind


def expected(content, pack):
    """The rules of a file, by the words of its page."""
    made = []
    for rule in content.get("rules", ()):
        chosen = []
        for wanted in rule["concepts"]:
            both = [(i, c[key]) for i, c in enumerate(pack.concepts) for key in ("id", "name")]
            exact = [i for i, text in both if text == wanted]
            chosen += exact or [i for i, text in both if "*" in wanted and matches(text, wanted.split("*"))]
        sets = f"rate_{rule['rate']:g}" if "rate" in rule else rule.get("alert_set")
        alert = (pack if sets is None else pack.with_alert_set(sets)).alert_threshold
        for probe in dict.fromkeys(chosen):
            above = rule.get("above", float(alert[probe]))
            aggregate = {"none": "each"}.get(rule.get("aggregate", "each"), rule.get("aggregate", "each"))
            made.append(
                (probe, round(above, 6), int(rule.get("for_tokens", 1)), aggregate, rule["action"], rule["on_blind"])
            )
    return made


def matches(text, parts):
    """Whether a text is made of these parts, in their order, with anything between."""
    first, *rest = parts
    if not text.startswith(first):
        return False
    text = text[len(first) :]
    if not rest:
        return not text
    if len(rest) == 1:
        return text.endswith(rest[0])
    at = text.find(rest[0])
    return at >= 0 and matches(text[at:], rest)
