"""A file, for review, that says what is watched and what follows.

    deployment = Deployment.read("watch.yaml")
    pack = deployment.open_packs()                         # exactly the packs that the file pins

docs/deployment.md has the format. `DynamicProbeManager.from_deployment` does all of this.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from probemon.core.concept_names import MOST_NAMED, Wanted
from probemon.core.drift_reference import DriftReference
from probemon.engine.scorer import Scorer
from probemon.errors import (
    ConfigError,
    DeploymentError,
    ModelMismatch,
    ProbemonError,
    RuleError,
    UnknownConcept,
    closest,
)
from probemon.host.compatibility import check_host
from probemon.host.fingerprint import fingerprint
from probemon.monitor.breaker import Breaker
from probemon.monitor.rule_spec import Rule, RuleSpec
from probemon.monitor.rules import ESCALATE
from probemon.monitor.sinks import JsonLinesSink, ParquetSink
from probemon.ops.budget import Budget
from probemon.ops.drift.drift_monitor import DriftMonitor, check_reference
from probemon.ops.judges.escalation import Escalate
from probemon.ops.judges.http_judge import LIMITS, HttpJudge
from probemon.ops.telemetry.otel_events import OpenTelemetryEvents
from probemon.packs.configured import ConfiguredPack, configure_group
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_path
from probemon.util.strict_json import loads, no_constant
from probemon.util.yaml_text import YamlText, read_yaml

SCHEMA = Path(__file__).with_name("deployment.schema.json")
_MAX_BYTES = 1 << 20
_CONCEPTS = ("always_on", "include", "exclude", "depth")
_SETTINGS = (*_CONCEPTS, "audit_rate")
_CHANGEABLE = ("name", "rules", "always_on", "exclude")  # during a run
_OF_ESCALATE = ("within", "meanwhile", "on_failure", "last_tokens")
_COUNTS = ("last_tokens", *LIMITS)  # of a judge
_LONGEST = 200
_MOST_SHOWN = 80  # characters of a text of the file
_LONG_WORD = re.compile(r"\S{300,}")
_NO_TEXT = object()
Steps = Sequence[str | int]


class Deployment:
    """The content of a file, as JSON has it. `name`: by default that of the file."""

    def __init__(self, path: Path, text: YamlText) -> None:
        self.path, self.content, self._text = path.absolute(), text.value, text
        self.name: str = self.content.get("name", path.name)
        canonical = json.dumps(self.content, sort_keys=True, separators=(",", ":"))
        self.sha256 = hashlib.sha256(canonical.encode()).hexdigest()
        self._rules: tuple[AnyPack, list[Rule]] | None = None
        self._exporter: Any = None
        self._drift: weakref.WeakKeyDictionary[Scorer, DriftMonitor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes new ones: judges hold connections, and workers must not listen.
        return {**vars(self), "_rules": None, "_exporter": None, "_drift": None}

    @classmethod
    def read(cls, path: str | Path) -> Deployment:
        """Read a file, YAML or JSON. Raises `DeploymentError` with the line of the first error."""
        file = check_path("path", path)
        if not file.is_file():
            raise DeploymentError(f"{file} is not a file: give a deployment, YAML or JSON (docs/deployment.md)")
        if file.stat().st_size > _MAX_BYTES:
            raise DeploymentError(f"{file.name} has more than {_MAX_BYTES:,} bytes: a deployment is written by hand")
        try:
            raw = file.read_text(encoding="utf-8-sig")
            raw.encode()
        except ValueError as error:
            raise DeploymentError(f"{file.name} is not UTF-8 text ({error}): save it as such") from None
        except OSError as error:
            raise DeploymentError(f"{file} cannot be read: {error.strerror}") from error
        return cls(file, _checked(raw, file))

    # -- what follows from it ----------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a manager, by name."""
        top_level = {name: self.content[name] for name in _SETTINGS if name in self.content}
        return {**self.content.get("cascade", {}), **top_level}

    @contextmanager
    def errors_of_settings(self) -> Iterator[None]:
        """Give an error about a setting its line, or that of all settings."""
        try:
            yield
        except (ConfigError, UnknownConcept) as error:
            places: list[Steps] = [["cascade", name] for name in self.content.get("cascade", {})]
            places += [[name] for name in _SETTINGS if name in self.content]
            named = [place for place in places if re.search(rf"\b{place[-1]}\b", str(error))]
            if isinstance(error, UnknownConcept):
                named = self._naming(error)
            steps: Steps = named[0] if named else ["cascade" if "cascade" in self.content else "packs"]
            raise self._error(steps, str(error)) from error

    def open_packs(self) -> AnyPack:
        """Open the packs with their alert sets. Raises `DeploymentError`, `PackError`."""
        opened: list[tuple[str, ProbePack]] = []
        for at, entry in enumerate(self.content["packs"]):
            with self._at("packs", at):
                pack = ProbePack.from_pretrained(self._beside(entry["pack"]), manifest_sha256=entry["manifest_sha256"])
                if "alert_set" in entry:
                    pack = pack.with_alert_set(entry["alert_set"])
                host_section = self.content.get("host", {})
                for key, manifest_key in (("model", "model_id"), ("fingerprint", "fingerprint")):
                    pack_value = pack.manifest["host"].get(manifest_key)
                    if key in host_section and pack_value not in (None, host_section[key]):
                        raise ConfigError(f"{pack.name} was made for {pack_value}, host.{key} is {host_section[key]}")
                opened.append((entry.get("name", pack.name), pack))
        if len(opened) == 1 and "name" not in self.content["packs"][0]:
            return opened[0][1]
        names = [name for name, _ in opened]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise self._error(["packs", at], f"a second pack is called {name!r:.80}: give one another name")
        with self._at("packs"):
            return PackGroup(dict(opened))

    def rules(self, pack: AnyPack) -> list[Rule]:
        """Return the rules, one for each concept. Raises `DeploymentError`.

        One pack always gets the same objects, and so the same baselines.
        """
        if self._rules is not None and self._rules[0] is pack:
            return list(self._rules[1])
        made: list[Rule] = []
        for at, rule in enumerate(self.content.get("rules", ())):
            fields = {name: value for name, value in rule.items() if name not in ("concepts", "judge", "action")}
            if "for_tokens" in fields:
                fields["for_tokens"] = int(fields["for_tokens"])  # JSON has integers such as 3.0
            action = self._escalate(at, rule["judge"]) if rule["action"] == ESCALATE else rule["action"]
            with self._at("rules", at):
                made += RuleSpec.from_dict(fields, concept=rule.get("concepts"), action=action).rules(pack)
        self._rules = (pack, made)
        return list(made)

    def metrics(self, pack: AnyPack) -> dict[str, Any] | None:
        """Return the Prometheus settings, with ids of concepts; None without metrics. Raises `DeploymentError`."""
        if "metrics" not in self.content:
            return None
        section = self.content["metrics"]
        with self._at("metrics", "concepts"):
            probes = pack.find_all(section["concepts"]) if section.get("concepts") else []
            if len(probes) > MOST_NAMED:
                raise ConfigError(f"{len(probes)} concepts, each a separate series: name at most {MOST_NAMED}")
            if names := self._left_out(pack, probes):
                raise ConfigError(
                    f"{names} is left out by include, exclude or depth, so that its count would stay where it is: watch"
                    " it, or do not count it"
                )
        port = {"port": int(section["port"])} if "port" in section else {}
        return {**section, **port, "concepts": [pack.concepts[probe]["id"] for probe in probes]}

    def configured(self, pack: AnyPack, probes: Sequence[int]) -> list[tuple[ConfiguredPack, list[int]]]:
        """Return each pack with its settings, and its numbers of `probes`. Raises `DeploymentError`."""
        settings = {name: value for name, value in self.settings.items() if name != "audit_rate"}
        with self.errors_of_settings():
            if not isinstance(pack, PackGroup):
                return [(ConfiguredPack.of(pack, settings), list(probes))]
            probes_by_pack = [part.tolist() for part in pack.split(probes)]
            return list(zip(configure_group(pack, settings), probes_by_pack, strict=True))

    def _left_out(self, pack: AnyPack, probes: Sequence[int]) -> str:
        """Return the first concept that is not watched, or ""."""
        for member, member_probes in self.configured(pack, probes) if probes else ():
            for probe in member_probes:
                if member.watched is not None and not member.watched[probe]:
                    return ascii(member.pack.concepts[probe]["name"])
        return ""

    @property
    def budget(self) -> Budget | None:
        """The budget of a step, if any."""
        with self._at("budget"):
            return Budget(**self.content["budget"]) if "budget" in self.content else None

    @property
    def breaker(self) -> Breaker | None:
        """When errors of scoring pause it."""
        with self._at("breaker"):
            return Breaker(**self.content["breaker"]) if "breaker" in self.content else None

    def reference(self, pack: AnyPack) -> DriftReference | None:
        """Return what requests are compared with; None without `drift`. Raises `DeploymentError`."""
        if "drift" not in self.content:
            return None
        file = self.content["drift"].get("reference")
        with self._at("drift", *(["reference"] if file is not None else [])):
            reference = getattr(pack, "drift_reference", None)
            if file is not None:
                reference = DriftReference.read(self.path.parent / file)
            if reference is None:
                raise ConfigError(
                    f"{pack.name} has no reference, so no alarm could be raised: give reference, a file that"
                    " DriftMonitor.freeze wrote (docs/drift.md)"
                )
            check_reference(reference, pack)
        return reference

    def drift(self, manager: Scorer) -> DriftMonitor | None:
        """Return the drift monitor that all runs of a manager share, if any. Raises `DeploymentError`."""
        if self._drift is None:
            self._drift = weakref.WeakKeyDictionary()
        if manager not in self._drift and (reference := self.reference(manager.pack)) is not None:
            self._drift.setdefault(manager, DriftMonitor(manager, reference))
        return self._drift.get(manager)

    def check_host(self, pack: AnyPack, model: Any) -> None:
        """Raise `ModelMismatch` if a model is not the stated one: by fingerprint, else by its packs."""
        entry = self.content.get("host", {})
        if "fingerprint" in entry and (actual := fingerprint(model)) != entry["fingerprint"]:
            line = self._text.line(["host", "fingerprint"])
            raise ModelMismatch(
                f"{self.path.name}, line {line}: host.fingerprint is {entry['fingerprint']:.80}, this model's is"
                f" {actual}:"
                " load the model that was reviewed, or review this one and state its fingerprint"
            )
        if "model" in entry and "fingerprint" not in entry:
            try:
                check_host(pack, model, strict=True)
            except ModelMismatch as error:
                line = self._text.line(["host", "model"])
                raise ModelMismatch(f"{self.path.name}, line {line}: host.model: {error}") from error

    def opentelemetry(self) -> OpenTelemetryEvents | None:
        """Return the follower that sends events, if any. Raises `DeploymentError`."""
        if "opentelemetry" not in self.content:
            return None
        with self._at("opentelemetry"):
            return OpenTelemetryEvents(self.content["opentelemetry"]["endpoint"])

    def sinks(self) -> list[JsonLinesSink | ParquetSink]:
        """Return new sinks. Raises `DeploymentError` if one could not be written."""
        made: list[JsonLinesSink | ParquetSink] = []
        for at, sink in enumerate(self.content.get("sinks", ())):
            with self._at("sinks", at):
                made.append(self._sink(sink))
                if any(one.path.resolve() == made[-1].path.resolve() for one in made[:-1]):
                    raise ConfigError(f"a second sink writes {sink['path']}, and the last one alone would be left")
        return made

    def check_parts(self, pack: AnyPack) -> None:
        """Check the other parts. Raises `DeploymentError`, `MissingExtra`, `ConfigError`."""
        self.metrics(pack)
        self.sinks()
        self.opentelemetry()
        self.reference(pack)
        _ = self.budget, self.breaker

    def followers(self, manager: Scorer, given: Sequence[Any] = ()) -> list[Any]:
        """Return followers of a run; budget and drift unless `given` has its own. Raises `DeploymentError`."""
        budget = None if any(isinstance(one, Budget) for one in given) else self.budget
        drift = None if any(isinstance(one, DriftMonitor) for one in given) else self.drift(manager)
        parts = (budget, drift, self.exporter(manager.pack), self.opentelemetry(), *self.sinks())
        return [one for one in parts if one is not None]

    def show(self, manager: Scorer) -> None:
        """Show its metrics from now on. Raises `DeploymentError`."""
        self.opentelemetry()
        self.drift(manager)
        self.exporter(manager.pack)

    def exporter(self, pack: AnyPack) -> Any:
        """Return the exporter of its metrics, started once. Raises `DeploymentError`, or `ConfigError` if it cannot
        listen.
        """
        if self._exporter is None and (section := self.metrics(pack)) is not None:
            from probemon.ops.telemetry.exporters import exporter

            self._exporter = exporter(**section)
        return self._exporter

    @property
    def names_model(self) -> bool:
        """True if it says which model it is for."""
        return "host" in self.content

    @property
    def says_what_follows(self) -> bool:
        """True if it has rules, which decide about unseen tokens."""
        return bool(self.content.get("rules"))

    def changed_by(self, newer: Deployment, manager: Scorer) -> tuple[list[Rule], list[str], list[str]]:
        """Check a newer file; return its rules, always-on and excluded concepts. Raises `DeploymentError`."""
        self.check_only_rules_differ(newer)
        newer.metrics(manager.pack)  # may be excluded now
        rules = newer.rules(manager.pack)
        on, off = (list(newer.content.get(name, [])) for name in ("always_on", "exclude"))
        with newer.errors_of_settings():
            manager.plan_with([probe for rule in rules for probe in rule.probes], exclude=off, always_on=on)
        return rules, on, off

    def check_exclude(self, manager: Scorer, exclude: Wanted) -> None:
        """Raise `ConfigError` if `exclude` leaves out a concept that metrics count."""
        metrics, watched = self.metrics(manager.pack), manager.plan_with((), exclude=exclude).watched
        if metrics is None or watched is None:
            return
        for concept in metrics["concepts"]:
            if not watched[manager.pack.find(concept)]:
                raise ConfigError(
                    f"exclude leaves out {concept!r:.80}, which metrics of {self.name} count, so that its count would"
                    " stay where it is: watch it, or do not count it"
                )

    def refused(self, key: str, why: str) -> DeploymentError:
        """Return the error for a part that its reader does not support."""
        return self._error([key], why)

    def check_only_rules_differ(self, newer: Deployment) -> None:
        """Raise `DeploymentError` if a newer file changes what cannot change during a run."""
        for key in newer.content | self.content:
            if key not in _CHANGEABLE and newer.content.get(key) != self.content.get(key):
                steps = [key] if key in newer.content else []
                raise newer._error(steps, f"{key} cannot change while it runs: end the run, and attach again")

    # -- inside ------------------------------------------------------------------------------------

    def _escalate(self, at: int, judge: Mapping[str, Any]) -> Escalate:
        judge = {name: int(value) if name in _COUNTS else value for name, value in judge.items()}  # JSON has 3.0
        options = {name: value for name, value in judge.items() if name in _OF_ESCALATE}
        asked = {name: value for name, value in judge.items() if name not in options}
        try:
            return Escalate(HttpJudge(**asked), **options)
        except ConfigError as error:
            named = [name for name in judge if re.match(rf"{name}\b", str(error))]
            raise self._error(["rules", at, "judge", *named[:1]], str(error)) from error

    def _sink(self, sink: Mapping[str, Any]) -> JsonLinesSink | ParquetSink:
        path, overwrite = self.path.parent / sink["path"], sink.get("overwrite", False)
        if sink["kind"] == "jsonl":
            return JsonLinesSink(path, overwrite, top_k=sink.get("top_k"))
        if "top_k" in sink:
            raise ConfigError("top_k is of jsonl: parquet holds every active concept")
        return ParquetSink(path, overwrite)

    def _beside(self, pack: str) -> str:
        folder = self.path.parent / pack
        return str(folder) if folder.is_dir() else pack

    def _naming(self, error: UnknownConcept) -> list[Steps]:
        lists = [(name, list(self.content.get(name, ()))) for name in _CONCEPTS]
        places: list[Steps] = [
            [name, concept if name == "depth" else at] for name, entries in lists for at, concept in enumerate(entries)
            if repr(concept) in str(error)
        ]  # fmt: skip
        return places or [[name] for name, entries in lists if entries]

    def _error(self, steps: Steps, message: str) -> DeploymentError:
        return _error(self.path, self._text, steps, message)

    @contextmanager
    def _at(self, *steps: str | int) -> Iterator[None]:
        """Give errors of the block this place in the file."""
        try:
            yield
        except DeploymentError:
            raise
        except (ProbemonError, OSError) as error:
            field = error.field if isinstance(error, RuleError) else ""
            field = "concepts" if field == "concept" else field
            named = field and field in self.content["rules"][steps[-1]]
            raise self._error([*steps, field] if named else steps, str(error)) from error


def _checked(raw: str, file: Path) -> YamlText:
    text = read_yaml(raw.replace("\t", " ") if file.suffix == ".json" else raw, file.name, DeploymentError)
    if file.suffix == ".json":  # JSON's numbers and texts are not YAML's
        try:
            text = YamlText(loads(raw, constant=no_constant), text.root, text.aliases)
        except (ValueError, RecursionError) as error:
            raise DeploymentError(f"{file.name} is not valid JSON: {str(error)[:_LONGEST]}") from None
    if text.aliases:
        raise DeploymentError(
            f"{file.name}, line {text.aliases[0]}: an alias hides this part from reviewers: write it out",
            text.aliases[0],
        )
    for steps, value in _leaves(text.value, []):
        if value is _NO_TEXT:
            raise _error(file, text, steps[:-1], f"the key {steps[-1]!r:.80} is not a text: put it in quotes")
        if isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
            raise _error(file, text, steps, f"{value!s:.80} is not a usable number here: give a finite one")
    # A mistyped key is unknown, rather than another one missing.
    problems = sorted(
        _validator()(text.value),
        key=lambda one: (one.validator == "required", text.line(one.absolute_path), one.message),
    )
    if problems:
        raise _explained(file, text, problems[0])
    return text


@cache
def schema() -> Any:
    """Return the JSON Schema of a file."""
    whole = json.loads(SCHEMA.read_text(encoding="utf-8"))
    rule = RuleSpec.schema(without=("concept",), required=("action", "on_blind"))
    named, action = {"$ref": "#/$defs/concepts", "minItems": 1}, rule["properties"]["action"]
    what = "Names, ids, or patterns with *: a rule for each concept that is meant."
    rule["properties"]["concepts"] = {"description": what, **named}
    rule["properties"]["judge"] = {"description": "The endpoint like OpenAI's that is asked.", "$ref": "#/$defs/judge"}
    action["description"] += " escalate: ask a judge."
    action["enum"].append(ESCALATE)
    del action["default"], rule["properties"]["on_blind"]["default"]
    rule["dependentSchemas"]["all_of"] = {"properties": {"concepts": False}}
    rule["allOf"] = [
        {"if": {"required": ["all_of"]}, "else": {"required": ["concepts"]}},
        {
            "if": {"required": ["action"], "properties": {"action": {"const": ESCALATE}}},
            "then": {"required": ["judge"]},
            "else": {"properties": {"judge": False}},
        },
    ]
    whole["properties"]["rules"]["items"] = rule
    return whole


@cache
def _validator() -> Callable[[Any], Iterator[Any]]:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(schema()).iter_errors  # type: ignore[no-any-return]


def _explained(file: Path, text: YamlText, problem: Any) -> DeploymentError:
    steps, subschema = list(problem.absolute_path), problem.schema
    if problem.validator == "additionalProperties":
        allowed = list(subschema["properties"])
        key = next(key for key in problem.instance if key not in allowed)
        remedy = closest(str(key), allowed) or f": the keys here are {', '.join(allowed)}"
        return _error(file, text, [*steps, key], f"the key {key!r:.80} is unknown{remedy}")
    if problem.validator == "required":
        key = next(key for key in subschema["required"] if key not in problem.instance)
        properties = subschema.get("properties") or schema()["properties"]["rules"]["items"]["properties"]
        what = properties[key].get("description", "")
        return _error(file, text, steps, f"{key} is missing: {what[:1].lower()}{what[1:]}".rstrip(": "))
    if "dependentSchemas" in problem.absolute_schema_path:
        rule, path = text.value["rules"][steps[1]], list(problem.absolute_schema_path)
        one = path[path.index("dependentSchemas") + 1]
        alternatives = ("concepts",) if one == "all_of" else ("alert_set", "rate")
        other = next(name for name in alternatives if name in rule and name != one)
        return _error(file, text, [*steps[:2], other], f"{one} is given, too: give one of the two")
    if "allOf" in problem.absolute_schema_path:
        return _error(file, text, [*steps[:2], "judge"], "this is for action: escalate")
    what = f" ({subschema['description']})" if isinstance(subschema, Mapping) and "description" in subschema else ""
    return _error(file, text, steps, f"{problem.message[:_LONGEST]}{what}")


def _error(file: Path, text: YamlText, steps: Steps, message: str) -> DeploymentError:
    line = text.line(steps)
    named = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    whole = _cut(f"{f'{named}: ' if named else ''}{message}", text.value)
    return DeploymentError(f"{file.name}, line {line}: {whole}", line)


def _cut(message: str, content: Any) -> str:
    """Shorten the texts of a file in a message."""
    texts = {key for steps, _ in _leaves(content, []) for key in steps if isinstance(key, str)}
    texts |= {value for _, value in _leaves(content, []) if isinstance(value, str)}
    for text in sorted((text for text in texts if len(text) > _MOST_SHOWN), key=len, reverse=True):
        for form in (text, repr(text)[1:-1]):
            message = message.replace(form, f"{form[:_MOST_SHOWN]}...")
    return _LONG_WORD.sub(lambda found: f"{found[0][:_MOST_SHOWN]}...", message)  # parts of a path


def _leaves(value: Any, steps: list[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    """Yield every scalar and its path; `_NO_TEXT` for what has another key than a text."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part if isinstance(key, str) else _NO_TEXT, [*steps, key])
    elif isinstance(value, list):
        for at, part in enumerate(value):
            yield from _leaves(part, [*steps, at])
    else:
        yield steps, value
