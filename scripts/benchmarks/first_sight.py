"""What `watch demo` shows: a sample of it for readers to judge, and the topics it finds, sentence by sentence.

    python scripts/benchmarks/first_sight.py sample --out FOLDER       # shown.txt for readers, and its key
    python scripts/benchmarks/first_sight.py topics --out FOLDER
    python scripts/benchmarks/first_sight.py judge --sample FOLDER --out docs/benchmarks/first_sight.json

Shown means: by the rules of the command, for answers of the model and for texts that trained nothing. A reader writes a
line for each number into `FOLDER/judged.txt`: `1 right told`, `2 wrong told`, `3 right untold`. *Told*: a word of the
sentence names the concept, or a thing of its kind, so that a list of words would show it as well.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from probemon import DynamicProbeManager
from probemon.bundled import load_bundled
from probemon.cli.common import demo_packs
from probemon.cli.watch.rules import Showing, Watching, running_rules
from probemon.lab.library.library import TESTS, Library
from probemon.monitor.result import leading
from probemon.monitor.summary import inside_words
from probemon.util.files import write_text_atomically
from provenance import about
from real_text import bbc, mails

N = 200
TOKENS = 64
CHARS = 900
BARS = {"precision": 0.95, "untold": 0.5, "topic_by_sentence": 0.7}
BBC_TOPICS = {"business": "economy", "politics": "politics", "sports": "sport", "tech": "technology"}
PROMPTS = (
    "Tell me about whales and the ships that hunted them.", "Write a German sentence about the weather in winter.",
    "My grandmother died last week and I do not know what to do.", "How do I bake bread without yeast?",
    "Write a SQL query that counts orders by customer.", "Who was the first person on the moon?",
    "Explain photosynthesis to a child.", "Write a short e-mail to my landlord about the broken heating.",
    "What is seven times eight? I think it is 54.", "Tell me how to pick the lock of my neighbour's door.",
    "Write a poem about the sea.", "Which team won the football match, and how did the players feel?",
    "Summarise: the court heard both sides and will rule on Monday.", "Plan three days in Lisbon for me.",
    "I feel so alone these days.", "Write a Python function that reads a file.", "Are you a human being?",
    "What are the side effects of aspirin?", "Translate into French: the cat sleeps on the chair.",
    "How does a bill become a law?", "Sell me this pen in two sentences.", "Describe a thunderstorm over the hills.",
    "I am furious, my parcel is late again!", "Why did the bank raise its interest rate?",
    "Write the rules of a library as a notice.", "What should soldiers do when a war ends?",
    "Tell me a story about a lighthouse keeper.", "Thank you so much, you saved my day!",
    "Give me a shell command that finds large files.", "What did people believe in ancient Egypt?",
    "Write a news report about a flood.", "Explain how vaccines work.", "Répondez en français: qui êtes-vous?",
    "Escribe una frase sobre la comida.", "List three planets as JSON.", "How do I fix a flat bicycle tyre?",
    "Who stole the painting, and how was the thief caught?", "You are a pirate. Greet me.",
    "I think the earth is flat. Do you agree?", "Write an advert for a garden hose.",
)  # fmt: skip


@dataclass(frozen=True)
class Sight:
    """A concept that is shown at a token, and the text around it; `of`: "nouns" or "concepts"."""

    of: str
    concept: str
    definition: str
    source: str
    before: str
    token: str
    after: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("sample", "topics", "judge"))
    parser.add_argument("--sample", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, required=True, metavar="PLACE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.what == "sample":
        sample(arguments.out)
    elif arguments.what == "topics":
        write_text_atomically(arguments.out / "topics.json", json.dumps(by_sentence(), indent=1))
    else:
        found = judged(arguments.sample)
        print(json.dumps(found["claims"], indent=1))
        write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


def sample(folder: Path) -> None:
    """Write the sights for readers, without anything but the text and the concept, and all counts."""
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_bundled()
    pack = demo_packs()
    manager = DynamicProbeManager(pack)
    showing = Showing.of(pack, (), 0.0, brief=True)
    sights, tokens = list[Sight](), Counter[str]()
    for prompt in PROMPTS:
        texts, found = answer_of(prompt, manager, showing, model, tokenizer)
        tokens["answers"] += len(texts)
        sights += [sight_of(manager.pack, texts, at, probe, "answer") for at, probe in found]
    for source, text in texts_of():
        texts, found = shown_in(text, manager, showing, model, tokenizer)
        tokens["texts"] += len(texts)
        sights += [sight_of(manager.pack, texts, at, probe, source) for at, probe in found]
    rng = random.Random(7)
    chosen = [one for of in ("nouns", "concepts") for one in drawn([s for s in sights if s.of == of], N // 2, rng)]
    rng.shuffle(chosen)
    counts = {
        "tokens": dict(tokens),
        "shown": {of: sum(one.of == of for one in sights) for of in ("nouns", "concepts")},
        "by_concept": dict(Counter(one.concept for one in sights if one.of == "concepts").most_common()),
    }
    write_text_atomically(folder / "key.json", json.dumps({"sights": [asdict(s) for s in chosen], **counts}, indent=1))
    write_text_atomically(folder / "shown.txt", "".join(lines_of(chosen)))


def drawn(sights: Sequence[Sight], n: int, rng: random.Random) -> list[Sight]:
    """Draw sights, half of them from answers, as far as there are."""
    pools = {of: [s for s in sights if (s.source == "answer") == of] for of in (True, False)}
    few = rng.sample(pools[True], min(n // 2, len(pools[True])))
    return few + rng.sample(pools[False], min(n - len(few), len(pools[False])))


def lines_of(sights: Sequence[Sight]) -> Iterator[str]:
    for number, one in enumerate(sights, 1):
        text = f"{one.before}[[{one.token}]]{one.after}".replace("\n", "\\n")
        yield f"{number}\n  concept: {one.concept} ({one.definition})\n  text: {text}\n"


def texts_of() -> Iterator[tuple[str, str]]:
    """Yield texts that trained nothing: tests of the library, news, mails."""
    library, rng = Library.open(), random.Random(3)
    rows = [row for id in library.concepts for row in library.raw(TESTS, id) if "text" in row]
    news = [text.text for text in bbc()]
    letters = [text.text for text in mails(CHARS) if text.label == "ham"]
    for source, texts in (("test", [row["text"] for row in rows]), ("BBC news", news), ("mail", letters)):
        for text in rng.sample(texts, 60):
            yield source, text[:CHARS]


def answer_of(prompt: str, manager: Any, showing: Showing, model: Any, tokenizer: Any) -> tuple[list[str], list[Any]]:
    """Return the tokens of an answer, and what is shown: pairs of token and probe."""
    watching = Watching([], None, showing.running)
    chat = [{"role": "user", "content": prompt}]
    events = list(
        manager.stream(model, tokenizer, chat, prepare=watching.prepare, max_new_tokens=TOKENS, do_sample=False)
    )
    texts = [event.token for event in events]
    inside = inside_words(texts)
    found = []
    for at, event in enumerate(events):
        if not inside[at]:
            found += [(at, concept.probe) for concept in event.leading(manager.pack.n_probes, showing.above)]
        risen = watching.risen.get(event.position, ())
        found += [(at, manager.pack.find(one.concept)) for one in risen]
    return texts, found


def shown_in(
    text: str, manager: Any, showing: Showing, model: Any, tokenizer: Any
) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the tokens of a text, and what is shown: pairs of token and probe."""
    inputs = tokenizer(text, return_tensors="pt")
    with manager.attach(model, tokenizer) as run:
        model(**inputs)
    result = run.result(inputs["input_ids"])
    tokens = result.tokens_of(0, None)
    texts = result.texts(tokens)
    inside, found = inside_words(texts), list[tuple[int, int]]()
    for at, index in enumerate(tokens.tolist()):
        if not inside[at]:
            where = result.where(index)
            concepts = leading(manager.pack, result.scores, index, manager.pack.n_probes, showing.above, **where)
            found += [(at, concept.probe) for concept in concepts]
    for rule in showing.running:
        running = result.aggregate(rule.probe, rule.aggregator, phase=None)
        is_over = np.zeros(len(texts), dtype=bool)
        is_over[running.positions] = running.values > rule.above
        rises = np.flatnonzero(is_over & ~np.concatenate([[False], is_over[:-1]]))
        found += [(int(at), rule.probe) for at in rises]
    return texts, sorted(found)


def sight_of(pack: Any, texts: Sequence[str], at: int, probe: int, source: str) -> Sight:
    """Return what a reader needs to judge a concept at a token."""
    concept = pack.concepts[probe]
    of, _, id = concept["id"].partition(":")
    path = " > ".join(pack.path(probe)[1:]) or concept["name"].partition(":")[2].replace("/", " > ")
    return Sight(
        of, path if of == "nouns" else id, concept["definition"], source,
        "".join(texts[max(0, at - 60) : at]), texts[at], "".join(texts[at + 1 : at + 25]),
    )  # fmt: skip


def by_sentence() -> dict[str, dict[str, Any]]:
    """Return how many sentences of texts about a topic show it, and how many show it at the pack's own threshold."""
    model, tokenizer = load_bundled()
    manager = DynamicProbeManager(demo_packs())
    pack, library, rng = manager.pack, Library.open(), random.Random(11)
    topics = library.chosen(["topic"])
    texts = {
        "tests": [
            (topic, row["text"][:CHARS])
            for topic in topics
            for row in library.raw(TESTS, topic)
            if topic in row["present"] and "text" in row
        ]
    }
    news = [text for text in bbc() if text.label in BBC_TOPICS]
    texts["BBC news"] = [(BBC_TOPICS[one.label], one.text[:CHARS]) for one in rng.sample(news, 120)]
    ids = [concept["id"] for concept in pack.concepts]
    probes = {topic: ids.index(f"concepts:{topic}") for topic in topics if f"concepts:{topic}" in ids}
    rules = {rule.probe: rule for rule in running_rules(pack, 0.0)}
    own = {rule.probe: rule.above for rule in running_rules(pack)}
    found: dict[str, dict[str, Any]] = {}
    for source, rows in texts.items():
        counts = {topic: Counter[str]() for topic in topics}
        for topic, text in rows:
            inputs = tokenizer(text, return_tensors="pt")
            with manager.attach(model, tokenizer) as run:
                model(**inputs)
            result = run.result(inputs["input_ids"])
            bounds = sentences(result.texts(result.tokens_of(0, None)))
            counts[topic]["sentences"] += len(bounds)
            if topic in probes:
                rule = rules[probes[topic]]
                running = result.aggregate(rule.probe, rule.aggregator, phase=None)
                values = np.zeros(len(result))
                values[running.positions] = running.values
                highest = [float(values[begin:end].max()) for begin, end in bounds]
                counts[topic]["shown"] += sum(value > rule.above for value in highest)
                counts[topic]["over_threshold"] += sum(value > own[rule.probe] for value in highest)
        held = {topic: dict(one) for topic, one in counts.items() if one["sentences"]}
        total = sum(counts.values(), Counter())
        found[source] = {"texts": len(rows), **total, "by_topic": held}
    return found


def sentences(tokens: Sequence[str]) -> list[tuple[int, int]]:
    """Return the bounds of sentences of at least six tokens."""
    ends = [i + 1 for i, token in enumerate(tokens) if re.search(r"[.!?]\s*$|\n", token)]
    ends = ends if ends and ends[-1] == len(tokens) else [*ends, len(tokens)]
    return [(a, b) for a, b in zip([0, *ends], ends, strict=False) if b - a >= 6]


def judged(folder: Path) -> dict[str, Any]:
    """Return precision and what a word of the sentence tells, from a reader's lines."""
    key = json.loads((folder / "key.json").read_text())
    lines = [line.split() for line in (folder / "judged.txt").read_text().splitlines() if line.strip()]
    verdicts = {int(number): (right, told) for number, right, told, *_ in lines}
    if set(verdicts) != set(range(1, len(key["sights"]) + 1)):
        raise SystemExit("judged.txt has not every number once")
    cells: dict[str, dict[str, int]] = {}
    for number, sight in enumerate(key["sights"], 1):
        right, told = verdicts[number]
        for name in (sight["of"], f"{sight['of']} in {'answers' if sight['source'] == 'answer' else 'texts'}", "all"):
            cell = cells.setdefault(name, {"shown": 0, "right": 0, "untold": 0, "untold_right": 0})
            cell["shown"] += 1
            cell["right"] += right == "right"
            cell["untold"] += told == "untold"
            cell["untold_right"] += (right, told) == ("right", "untold")
    topics = json.loads((folder / "topics.json").read_text())
    values = {
        "precision": cells["all"]["right"] / cells["all"]["shown"],
        "untold": cells["all"]["untold"] / cells["all"]["shown"],
        "topic_by_sentence": topics["BBC news"]["shown"] / topics["BBC news"]["sentences"],
    }
    wrong = [
        {"concept": sight["concept"], "token": sight["token"], "source": sight["source"]}
        for number, sight in enumerate(key["sights"], 1)
        if verdicts[number][0] != "right"
    ]
    return {
        "judged": cells,
        "wrong": wrong,
        **{name: key[name] for name in ("tokens", "shown", "by_concept")},
        "topics": topics,
        "claims": {
            name: {"value": round(value, 3), "bar": BARS[name], "holds": value >= BARS[name]}
            for name, value in values.items()
        },
        **about(),
    }


if __name__ == "__main__":
    main()
