"""Scores every document of a corpus and writes parquet shards, which an interrupted run continues.

    analysis = analyze(manager, model, tokenizer, "mails.jsonl", out="scores/", resume=True)
    analysis.concepts().to_pandas()

A row is a document, a token and a concept above the floor. Rows do not depend on interruptions or the number of
processes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.core.settings import CascadeConfig
from probemon.engine.audit import Audit
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.host.chat_forms import PARTS
from probemon.host.fingerprint import (
    adapters_fingerprint,
    config_fingerprint,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from probemon.host.model import model_state
from probemon.lab.corpora.analysis_files import COUNTED, arrow, read_json, schemas
from probemon.lab.corpora.analysis_folder import MANIFEST, Analysis
from probemon.lab.corpora.corpus import CorpusScorer, ScoredShard
from probemon.lab.corpora.documents import MAX_CHARS, Documents, Source
from probemon.lab.corpora.state_reader import give_back
from probemon.lab.corpora.windows import DocumentShard, Reading, shards
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.manifest import CONCEPTS, PROBES
from probemon.packs.opened import OpenedPack, rewritten_weights
from probemon.util.checks import check_bool, check_number, is_int, shown

Progress = Callable[[float, int], object]


def analyze(
    manager: Scorer,
    model: Any,
    tokenizer: Any,
    documents: Source | Documents,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    floor: float | str = "fired",
    reading: Reading | None = None,
    keep_text: bool = True,
    text_field: str = "text",
    id_field: str = "id",
    max_chars: int = MAX_CHARS,
    strict: bool = False,
    rank: int = 0,
    world_size: int = 1,
    progress: Progress | None = None,
) -> Analysis:
    """Score every token of `documents` and write the rows above the floor to the folder `out`.

    - `documents`, `text_field`, `id_field`, `max_chars`: see `probemon.lab.corpora.documents`. A `Documents` has its
      own fields.
    - `reading`: how they are read; `Reading(on=("assistant",))` counts only these parts of chats.
    - `resume`: continue an analysis of the same settings and documents, or of more documents.
    - `floor`: a score, or "fired" for each concept's alert threshold.
    - `keep_text`: write texts and tokens.
    - `rank`, `world_size`: of processes on one file system, which share the shards.
    - `progress(n_documents, n_tokens)`: called with increments.

    Raises `ConfigError`, but not for a bad document.
    """
    arrow()
    if not is_int(rank) or not is_int(world_size) or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {shown(rank)} of world_size {shown(world_size)} processes: give 1 or more processes, and a rank from"
            " 0 to one less"
        )
    corpus = documents if isinstance(documents, Documents) else Documents(documents, text_field, id_field, max_chars)
    check_apart(corpus.source, out)
    check_bool("resume", resume)
    table = Tables(manager.pack, floor, keep_text, manager.plan.watched)
    scorer = CorpusScorer(manager, model, tokenizer, reading or Reading(), strict=strict, floor=table.lowest)
    analysis = _begin(out, scorer, table, resume)
    with analysis.locked(rank, world_size):
        digests: list[str] = []

        def missing() -> Iterator[DocumentShard]:
            for shard in shards(corpus):
                digests.append(shard.digest)
                record = check_known(analysis, shard, world_size)
                if record is None:  # also if another rank has to make it
                    analysis.reopen(shard.index, digests[-1])
                if record is None and shard.index % world_size == rank:
                    yield shard
                elif progress is not None:
                    progress(len(shard.documents), 0)

        for scored in scorer.score(missing(), progress=progress):
            write(analysis, table, scored)
        analysis.finish(digests)
    return analysis


def _begin(out: str | os.PathLike[str], scorer: CorpusScorer, table: Tables, resume: bool) -> Analysis:
    try:
        return Analysis.begin(out, identity(scorer, table), environment(), resume=resume)
    except ConfigError:
        # Another run or process may have measured another strategy as faster.
        begun_with = kernel_of(out).get("strategy")
        if not scorer.manager.strategy.measured or begun_with in (None, scorer.strategy):
            raise
        scorer.strategy = begun_with
        return Analysis.begin(out, identity(scorer, table), environment(), resume=resume)


def kernel_of(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Return `impl` and `strategy` of the analysis in a folder, to continue with the same."""
    begun = read_json(Path(out) / MANIFEST) is not None
    kernel = Analysis.open(out, unfinished=True).manifest["identity"]["kernel"] if begun else {}
    return {name: kernel[name] for name in ("impl", "strategy") if name in kernel}


def check_apart(documents: Source, out: str | os.PathLike[str]) -> None:
    """Raise `ConfigError` if the output folder is inside the input folder."""
    if (
        isinstance(documents, (str, os.PathLike))
        and Path(documents).is_dir()
        and Path(out).resolve().is_relative_to(Path(documents).resolve())
    ):
        raise ConfigError(f"{out} is in {documents}, whose files are read: give a folder outside of it")


def check_known(analysis: Analysis, shard: DocumentShard, world_size: int = 1) -> dict[str, Any] | None:
    """Return `analysis.shard`, or None if documents were appended. Raises `ConfigError` if documents changed."""
    record = analysis.shard(shard.index)
    if record is None or record["digest"] == shard.digest:
        return record
    n_before = record["n_documents"]
    has_grown = n_before < len(shard.documents) and record["digest"] == shard.digest_of(n_before)
    if has_grown and analysis.is_last(shard.index):
        return None
    remedy = "give another folder"
    if world_size > 1:
        remedy += ", and every rank the same documents in the same order (sets and listings of folders have none)"
    raise ConfigError(f"{_changed(analysis, record, shard)} since {analysis.directory} was begun: {remedy}")


def _changed(analysis: Analysis, record: Mapping[str, Any], shard: DocumentShard) -> str:
    first, n_before, n_now = record["first"], record["n_documents"], len(shard.documents)
    for before, now in zip(analysis.shard_documents(shard.index), shard.documents, strict=False):
        is_same = (before["doc_id"], before["n_chars"]) == (now.id, len(now.text))
        if not is_same or (not now.reason and before["text"] not in (None, now.text)):
            change = (
                "has changed" if before["doc_id"] == now.id else f"has taken the place of {before['doc_id']!r:.100}"
            )
            return f"document {now.index} (id {now.id!r:.100}) {change}"
    if n_now < n_before and shard.is_last:
        gone = f"document {first + n_now} is" if n_now + 1 == n_before else f"documents from {first + n_now} on are"
        return f"{gone} gone"
    if n_now != n_before:  # a shard ends before a document that is too long for it
        return f"document {first + min(n_now, n_before)} has changed"
    return f"one of the documents {first} to {first + n_now - 1} has changed"


def write(analysis: Analysis, table: Tables, scored: ScoredShard) -> None:
    """Write a scored shard to the folder."""
    first = scored.shard.documents[0].index if scored.documents else 0
    tables, totals = table.of(scored)
    analysis.write_shard(
        scored.shard.index,
        tables,
        {"digest": scored.shard.digest, "first": first, "n_documents": len(scored.documents), "totals": totals},
    )
    arrow().default_memory_pool().release_unused()
    give_back()


def identity(scorer: CorpusScorer, table: Tables) -> dict[str, Any]:
    """Return everything that rows depend on, except the documents."""
    manager, decoder, reading = scorer.manager, scorer.reader.host, scorer.reader.reading
    state, config = model_state(decoder), manager.config
    return {
        "pack": _identified(manager.pack),
        "host": {
            "model": state.model,
            "dtype": state.dtype,
            "weights": weights_fingerprint(decoder),
            "config": config_fingerprint(decoder),
            "adapters": state.adapters,
            "adapter_weights": adapters_fingerprint(scorer.reader.model, decoder),
            "quantisation": state.quantisation,
            "device": decoder.device.type,
        },
        "tokenizer": tokenizer_fingerprint(scorer.reader.tokenizer),
        "around": scorer.reader.around(),
        # Shard digests are of unrendered chats.
        "chat_template": hashlib.sha256(
            str(getattr(scorer.reader.tokenizer, "chat_template", "")).encode()
        ).hexdigest()[:32],
        "cascade": (
            dataclasses.asdict(config)
            if isinstance(config, CascadeConfig)
            else {name: dataclasses.asdict(settings) for name, settings in config.items()}
        ),
        "kernel": {"impl": manager.impl, "device": manager.device.type, "strategy": scorer.strategy},
        "reading": {**dataclasses.asdict(reading), "window": dataclasses.asdict(scorer.reader.window)},
        "audit_rate": manager.audit_rate,
        "floor": table.floor,
        "keep_text": table.keep_text,
    }


def _identified(pack: AnyPack) -> dict[str, Any]:
    if isinstance(pack, PackGroup):
        return {"name": pack.name, "packs": {name: _identified(member) for name, member in pack.packs.items()}}
    files, written_weights = pack.manifest["files"], rewritten_weights(pack)
    return {
        "name": pack.name,
        "concepts": files[CONCEPTS]["sha256"],
        "probes": files[PROBES]["sha256"],
        "inputs": [dataclasses.asdict(spec) for spec in pack.inputs],
        "score_rule": pack.score_rule,
        "thresholds": _of_thresholds(pack),
        **({} if pack.alert_set is None else {"alert_set": pack.alert_set}),
        **({} if written_weights is None else {"weights": written_weights}),
    }


def _of_thresholds(pack: OpenedPack) -> str:
    vectors = (pack.alert_threshold, pack.expand_threshold)
    return hashlib.sha256(b"".join(vector.numpy().tobytes() for vector in vectors)).hexdigest()[:32]


def environment() -> dict[str, Any]:
    """Return versions and settings that may change the last bits of scores."""
    import tokenizers
    import torch
    import transformers

    return {
        "probemon": version("probemon"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }


class Tables:
    """Builds the tables of scored shards; `watched [P]` defaults to all. Raises `ConfigError`."""

    def __init__(self, pack: AnyPack, floor: float | str, keep_text: bool, watched: Mask | None = None) -> None:
        if not isinstance(floor, str) or floor != "fired":
            remedy = (
                "scores are between 0 and 1 and must exceed it, so give 0 or more, and less than 1; or 'fired' for the"
                " alert thresholds of the pack"
            )
            floor = check_number("floor", floor, low=0, high=1, open_high=True, remedy=remedy)
        for member in (pack.packs.values() if isinstance(pack, PackGroup) else [pack]) if floor == "fired" else ():
            if np.isnan(member.alert_threshold.numpy()).all():
                raise ConfigError(
                    f"{member.name} has no alert thresholds, so nothing of it fires: give a floor, such as 0.5, or"
                    " calibrate it"
                )
        self.pack, self.floor, self.keep_text = pack, floor, check_bool("keep_text", keep_text)
        self.lowest = None if isinstance(floor, str) else float(floor)
        self._watched = np.ones(pack.n_probes, dtype=bool) if watched is None else watched
        self._concepts = [concept["id"] for concept in pack.concepts]

    def of(self, scored: ScoredShard) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the four tables of a shard by name, and its totals."""
        scores, p, own = scored.scores, self.pack.n_probes, scored.counted
        n_documents, lengths = len(scored.documents), np.diff(scored.ptr)
        place = np.repeat(np.arange(n_documents), lengths)
        position = np.arange(len(place)) - np.repeat(scored.ptr[:-1], lengths)
        pair_of = scores.state_of
        above = scores.fired_mask if self.floor == "fired" else scores.values > np.float32(self.floor)
        above = above & own[pair_of]
        token, probe, value = pair_of[above], scores.probes[above].astype(np.int64), scores.values[above]
        n_tokens = np.bincount(place, weights=own, minlength=n_documents).astype(np.int64)
        seen = np.bincount(place, weights=scores.coverage.seen & own, minlength=n_documents)
        counts = {
            name: np.bincount(place, weights=getattr(scores.coverage, name) * own, minlength=n_documents).astype(
                np.int64
            )
            for name in COUNTED
        }

        total = np.bincount(
            place[pair_of] * p + scores.probes,
            weights=scores.values.astype(np.float64) * own[pair_of],
            minlength=n_documents * p,
        ).reshape(n_documents, p)
        # The first row of each (document, concept) is its earliest maximum.
        order = np.lexsort((position[token], -value, probe, place[token]))
        key = (place[token] * p + probe)[order]
        begin = np.flatnonzero(np.diff(key, prepend=-1))
        n_above, best = np.diff(np.append(begin, len(key))), order[begin]
        of_document, of_concept = key[begin] // p, key[begin] % p

        summary = {
            "document": self._index(scored)[of_document],
            "doc_id": self._ids(scored, of_document),
            "concept": self._named(of_concept),
            "level": self._level(of_concept),
            "n_tokens": n_above,
            "max_score": value[best],
            "max_position": position[token[best]],
            "mean_score": total[of_document, of_concept] / seen[of_document],
        }
        tables = {
            "scores": self._scores(scored, place, position, token, probe, value),
            "documents": self._documents(
                scored, n_tokens, n_tokens - seen, np.bincount(place[token], minlength=n_documents), counts
            ),
            "summary": summary,
            "concepts": self._whole(of_concept, n_above, value[best], total.sum(axis=0))
            | {"n_by_part": self._by_part(scored, token, probe)},
        }
        pa = arrow()
        arrow_tables = {
            name: pa.Table.from_arrays(
                [
                    column if isinstance(column, pa.Array) else pa.array(column, field.type)
                    for column, field in zip(columns.values(), schema, strict=True)
                ],
                schema=schema,
            )
            for (name, columns), schema in zip(tables.items(), schemas().values(), strict=True)
        }
        totals = {
            "documents": n_documents,
            "bad_documents": sum(bool(document.reason) for document in scored.documents),
            "tokens": int(own.sum()),
            "unseen": int(own.sum() - seen.sum()),
            "rows": len(token),
            **{name: int(values.sum()) for name, values in counts.items()},
        }
        return arrow_tables, totals | {"audit": Audit.of(scores.coverage).as_dict()}

    def _scores(
        self, scored: ScoredShard, place: Any, position: Any, token: Any, probe: Any, value: Any
    ) -> dict[str, Any]:
        encoded = [tokens for tokens in scored.tokens if tokens is not None]
        ids, start, end = (
            np.concatenate([np.zeros(0, np.int64), *(getattr(tokens, name) for tokens in encoded)])[token]
            for name in ("ids", "start", "end")
        )
        turn, part = (_of_chats(scored, name)[token] for name in ("turn", "part"))
        distinct, at = np.unique(token, return_inverse=True)
        texts = [self._text(scored, int(place[t]), int(position[t])) if self.keep_text else "" for t in distinct]
        ids = ids if self.keep_text else np.full_like(ids, -1)  # token ids reveal the text
        return {
            "document": self._index(scored)[place[token]],
            "doc_id": self._ids(scored, place[token]),
            "position": position[token],
            "start": start,
            "end": end,
            "token_id": ids,
            "token": _dictionary(at, texts),
            "concept": self._named(probe),
            "level": self._level(probe),
            "score": value,
            "turn": arrow().array(turn, mask=turn < 0),
            "part": _parts(part),
        }

    def _by_part(self, scored: ScoredShard, token: Any, probe: Any) -> list[Any]:
        """Count tokens over the floor of each concept by part of a chat `[P, PARTS]`."""
        part = _of_chats(scored, "part")[token]
        counts = np.zeros((self.pack.n_probes, len(PARTS)), dtype=np.int64)
        np.add.at(counts, (probe[part >= 0], part[part >= 0]), 1)
        return list(counts)

    def _text(self, scored: ScoredShard, place: int, position: int) -> str:
        tokens = scored.tokens[place]
        assert tokens is not None
        return (
            scored.documents[place].text[tokens.start[position] : tokens.end[position]]
            if tokens.start[position] >= 0
            else ""
        )

    def _documents(
        self, scored: ScoredShard, n_tokens: Any, n_unseen: Any, n_rows: Any, counts: dict[str, Any]
    ) -> dict[str, Any]:
        documents = scored.documents
        return {
            "document": self._index(scored),
            "doc_id": [d.id for d in documents],
            "reason": [d.reason for d in documents],
            "n_chars": [len(d.text) for d in documents],
            "n_tokens": n_tokens,
            "n_unseen": n_unseen.astype(np.int64),
            "n_rows": n_rows,
            **counts,
            "text": [d.text if self.keep_text and not d.reason else None for d in documents],
        }

    def _whole(self, concept: Any, n_tokens: Any, best: Any, total: Any) -> dict[str, Any]:
        p, concepts = self.pack.n_probes, self.pack.concepts
        highest = np.zeros(p, dtype=np.float32)
        np.maximum.at(highest, concept, best)
        return {
            "concept": self._concepts,
            "name": [c["name"] for c in concepts],
            "level": self.pack.tree.level,
            "parents": [c["parents"] for c in concepts],
            "path": [self.pack.path(i) for i in range(p)],
            "watched": self._watched,
            "alert_threshold": self.pack.alert_threshold.numpy(),
            "precision": [None if math.isnan(share) else share for share in map(self.pack.precision, range(p))],
            "n_documents": np.bincount(concept, minlength=p),
            "n_tokens": np.bincount(concept, weights=n_tokens, minlength=p).astype(np.int64),
            "max_score": highest,
            "score_sum": total,
        }

    def _index(self, scored: ScoredShard) -> Any:
        return np.asarray([document.index for document in scored.documents], dtype=np.int64)

    def _ids(self, scored: ScoredShard, place: Any) -> Any:
        return _dictionary(place, [document.id for document in scored.documents])

    def _named(self, probe: Any) -> Any:
        return _dictionary(probe, self._concepts)

    def _level(self, probe: Any) -> Any:
        return self.pack.tree.level[probe]


def _of_chats(scored: ScoredShard, name: str) -> Any:
    """Return `turn` or `part` of each token of a shard, -1 if there is none."""
    encoded = [tokens for tokens in scored.tokens if tokens is not None]
    values = [
        np.full(len(tokens), -1) if getattr(tokens, name) is None else getattr(tokens, name) for tokens in encoded
    ]
    return np.concatenate([np.zeros(0, np.int64), *values])


def _parts(part: Any) -> Any:
    """Return names of parts as an Arrow dictionary without unused ones, null for -1."""
    pa = arrow()
    used = np.unique(part[part >= 0])
    at = pa.array(np.searchsorted(used, part), pa.int32(), mask=part < 0)
    return pa.DictionaryArray.from_arrays(at, pa.array([PARTS[i] for i in used], pa.string()))


def _dictionary(at: Any, texts: Sequence[str]) -> Any:
    """Return `texts[at]` as a sorted Arrow dictionary without unused texts, for reproducible files."""
    pa = arrow()
    names, to = (
        np.unique(np.asarray(texts, dtype=object), return_inverse=True)
        if texts
        else (np.zeros(0, object), np.zeros(0, np.int64))
    )
    used, at = np.unique(to[at], return_inverse=True)
    return pa.DictionaryArray.from_arrays(pa.array(at, pa.int32()), pa.array(names[used], pa.string()))
