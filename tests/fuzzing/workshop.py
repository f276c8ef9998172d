"""Files and folders that a command may be given: valid ones, made once, and what people give instead.

    shop = Workshop(folder)
    shop.put("pack", place)                 # a copy of a valid pack at `place`
    shop.put("loop", place)                 # a link that leads to itself
    shop.names, VALID["pack"]               # every kind; the kinds that a parameter of that name is meant for

The model is tiny and its weights are random, so that no command takes long.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import safetensors.torch
import torch

from conftest import make_model, make_pack
from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager, ProbePack

CHATS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + '. ' + m['content'] + ' </s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant. ' }}{% endif %}"
)
# By the name of a parameter (of one command, or of all), what it is meant for. One that is not here is given anything.
VALID = {
    "analyze source": ("docs.jsonl", "docs.txt", "docs.parquet", "folder", "-"),
    "import source": ("heads.safetensors", "x.pt", "x.npz"),
    "diff a": ("analysis",),
    "diff b": ("analysis-2",),
    "model": ("host",),
    "pack": ("pack", "flat"),
    "more_packs": ("flat", "pack"),
    "folders": ("pack", "flat"),
    "source": ("pack", "flat"),
    "benign": ("docs.jsonl", "docs.txt", "docs.parquet"),
    "positive": ("docs.jsonl", "rows.jsonl"),
    "data": ("rows.jsonl", "rows.csv", "rows.parquet", "concepts.yaml", "chats.jsonl"),
    "test": ("rows.jsonl", "rows.csv"),
    "directory": ("analysis",),
    "a": ("pack", "flat"),
    "b": ("flat", "pack"),
    "mapping": ("heads.json",),
    "names": ("names.json",),
    "tree": ("tree.json",),
    "hierarchy": ("tree.json",),
    "deployment": ("deployment.yaml",),
    "file": ("deployment.yaml",),
    "states": ("new",),
    "out": ("new",),
    "target": ("new",),
    "report": ("new",),
}
MADE = (
    "host",
    "pack",
    "flat",
    "analysis",
    "analysis-2",
    "folder",
    *("docs.jsonl", "docs.txt", "docs.parquet", "rows.jsonl", "rows.csv", "rows.parquet", "chats.jsonl"),
    *("concepts.yaml", "heads.safetensors", "heads.json", "names.json", "tree.json", "deployment.yaml"),
)
ODD = (
    *("new", "absent", "new/below/it", "empty.jsonl", "empty", "binary", "loop", "broken link", "line\nbreak.jsonl"),
    *("array.json", "spread.json", "deep.json", "nul.txt", "wrong.csv", "x.npz", "x.pt", "x.gguf", "x.png", "x.gz"),
    *("dataset", "x.safetensors.index.json", "pipe", "null", "full", "/sys/new", "-", "long" * 80),
)


class Workshop:
    """Valid files of every kind in one folder, from which cases take copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        model, tokenizer = make_model(hidden=16), make_tokenizer()
        tokenizer.chat_template = CHATS
        model.save_pretrained(folder / "host")
        tokenizer.save_pretrained(folder / "host")
        # Opened by this name, as a command opens it: the pack states the model's fingerprint.
        make_pack(folder / "pack", model, n=12)
        make_pack(folder / "flat", model, n=7, rule="independent", seed=1)
        self._write_texts(Random(0))
        self._write_tensors()
        pack = DynamicProbeManager(ProbePack.open(folder / "pack"))
        for name, texts in (("analysis", random_texts(6)), ("analysis-2", random_texts(6, seed=1))):
            pack.analyze(model, tokenizer, texts, folder / name, floor=0.3)

    def _write_texts(self, rng: Random) -> None:
        texts = random_texts(40)
        labels = [["sea"] if rng.random() < 0.5 else [] for _ in texts]
        rows = [
            {"text": text, "labels": some, "not": [] if some else ["sea"]}
            for text, some in zip(texts, labels, strict=True)
        ]
        chats = [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a sea."}], **label}
            for text, label in zip(texts, ({k: row[k] for k in ("labels", "not")} for row in rows), strict=True)
        ]
        documents = [{"id": f"d{i}", "text": text} for i, text in enumerate(texts[:8])]
        for name, items in (("docs", documents), ("rows", rows), ("chats", chats)):
            self._text(f"{name}.jsonl", "".join(json.dumps(item) + "\n" for item in items))
            pa.parquet.write_table(pa.Table.from_pylist(items), self.folder / f"{name}.parquet")
        self._text("docs.txt", "\n".join(texts[:8]))
        cells = [f'"{row["text"]}",{";".join(row["labels"])},{";".join(row["not"])}' for row in rows]
        self._text("rows.csv", "\n".join(["text,labels,not", *cells]) + "\n")
        self._text(
            "concepts.yaml", f"- {{id: sea, examples: {json.dumps(texts[:9])}}}\n- {{id: land, examples: [a]}}\n"
        )
        (self.folder / "folder").mkdir()
        for i, text in enumerate(texts[:4]):
            self._text(f"folder/{i}.txt", text)
        self._text("names.json", '{"0": "sea"}')
        self._text("tree.json", '{"c0": ["c1", "c2"]}')
        self._text("heads.json", '{"probes": {"sea": {"weight": "w", "bias": "b"}}, "site": "resid_post.1"}')
        self._text("deployment.yaml", f"pack: {self.folder / 'pack'}\nmodel: {self.folder / 'host'}\n")

    def _write_tensors(self) -> None:
        tensors = {"w": torch.randn(16), "b": torch.zeros(1)}
        safetensors.torch.save_file(tensors, self.folder / "heads.safetensors")
        torch.save(tensors, self.folder / "x.pt")
        np.savez(self.folder / "x.npz", w=np.zeros(3))

    def _text(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def put(self, kind: str, place: Path) -> None:
        """Put what a kind is named for at `place`; nothing for a path that leads elsewhere or is not to be there."""
        source = self.folder / kind
        if kind.startswith(("/", "-", "new", "absent", "long")):
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place)
        elif source.is_file():
            shutil.copyfile(source, place)
        elif kind in ("null", "full"):  # links: a command that replaces what it is given may run with all rights
            place.symlink_to(f"/dev/{kind}")
        elif kind == "loop":
            place.symlink_to(place.name)
        elif kind == "broken link":
            place.symlink_to("nowhere")
        elif kind == "empty":
            place.mkdir()
        elif kind == "pipe":
            os.mkfifo(place)
        elif kind == "dataset":
            place.mkdir()
            for name in ("state.json", "dataset_info.json"):
                (place / name).write_text("{}")
        else:
            place.write_bytes(_CONTENTS.get(kind, b""))


_CONTENTS = {
    "binary": bytes(range(256)) * 4,
    "line\nbreak.jsonl": b'{"text": "a sea"}\n',
    "array.json": b'[{"text": "a sea", "labels": ["sea"]}]\n',
    "spread.json": b'{\n  "text": "a sea"\n}\n',
    "deep.json": b"[" * 5000,
    "nul.txt": b"a\0b\0c\n",
    "wrong.csv": b"text;labels\na;b\n",
    "x.gguf": b"GGUF\x03\0\0\0" + bytes(64),
    "x.png": b"\x89PNG\r\n\x1a\n" + bytes(64),
    "x.gz": b"\x1f\x8b\x08\0" + bytes(30),
    "x.safetensors.index.json": b'{"weight_map": {}}',
}


def break_file(path: Path, rng: Random) -> None:
    """Change a file, or one of a folder: cut it, flip a byte, insert some, double it, or take it away."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        if not files:
            return
        path = rng.choice(files)
    if not path.is_file() or path.is_symlink():
        return
    data, way = path.read_bytes(), rng.randrange(6)
    at = rng.randrange(len(data) + 1)
    if way == 0:
        path.unlink()
    elif way == 1:
        path.write_bytes(data[:at])
    elif way == 2 and data:
        path.write_bytes(data[: at - 1] + bytes([rng.randrange(256)]) + data[at:])
    elif way == 3:
        path.write_bytes(data[:at] + rng.choice((b"\xff", b"\0", b"\n", b'"', b"{", b"9" * 400)) + data[at:])
    elif way == 4:
        path.write_bytes(data + data)
    else:
        path.unlink()
        path.mkdir()
