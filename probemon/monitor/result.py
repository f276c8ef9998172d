"""Result: what was active at which token of `generate`'s output.

result = run.result(out)
for concept in result.top(10, row=0):
    print(concept.score, " > ".join(concept.path), concept.token, concept.position)
result.coverage.totals()
table = result.to_arrow()                 # row, position, token_id, phase, concept, level, score
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator, Doubles, named, over
from probemon.core.baselines import is_of_traffic, needs_every_token, with_counts
from probemon.core.hierarchy import Ints, Mask
from probemon.core.memory_reads import Reading, with_texts
from probemon.core.scores import PHASES, Coverage, HostState, Scores
from probemon.engine.audit import Audit
from probemon.errors import AlignmentError, ConfigError
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.strength import strength_of, strength_or_score
from probemon.tracking.hand_loop import described
from probemon.tracking.recording import FORGOTTEN, RecordedTokens, Recording
from probemon.tracking.run_recordings import find_recording
from probemon.util.checks import MOST, check_count, shown
from probemon.util.extras import import_arrow
from probemon.util.harmless_text import clip
from probemon.util.token_texts import TokenTexts


@dataclass(frozen=True)
class ConceptScore:
    """A concept at a token.

    `strength`: logit of the score minus that of its alert threshold, NaN without one. `precision`: the share of what
    fires that was right where the pack was calibrated, NaN where the pack does not say.
    """

    concept: str
    name: str
    path: tuple[str, ...]
    level: int
    score: float
    threshold: float
    strength: float
    fired: bool
    probe: int
    position: int = -1
    token_id: int = -1
    token: str = ""
    precision: float = math.nan


def describe(pack: AnyPack, probe: int, score: float, threshold: float | None = None, **where: Any) -> ConceptScore:
    """Describe a probe and its score in words. `threshold`: what it had to exceed, by default its alert threshold. Of a
    lower one nobody knows how often it is right.
    """
    concept, alert = pack.concepts[probe], float(pack.alert_threshold[probe])
    threshold = alert if threshold is None else threshold
    return ConceptScore(
        concept=concept["id"],
        name=concept["name"],
        path=tuple(pack.path(probe)),
        level=int(pack.tree.level[probe]),
        score=score,
        threshold=threshold,
        strength=float(strength_of(np.float32(score), np.float32(threshold))),
        fired=score > threshold,
        probe=probe,
        precision=pack.precision(probe) if threshold >= alert else math.nan,
        **where,
    )


def firing(scores: Scores, t: int, above: Doubles | None = None) -> dict[int, float]:
    """Return the firing probes of state `t` with their scores, ascending; `above` as in `leading`."""
    values = dict(zip(scores.active(t).tolist(), scores.active_scores(t).tolist(), strict=True))
    return {p: values[p] for p in scores.fired(t).tolist() if above is None or values[p] > above[p]}


def leading(
    pack: AnyPack, scores: Scores, t: int, k: int, above: Doubles | None = None, **where: Any
) -> list[ConceptScore]:
    """Return the firing concepts of state `t` by strength, at most `k`: of those on one path the lowest alone.

    `above [P]`: what scores have to exceed beside their alert thresholds, infinite for a concept that is left out.
    `where`: the token's position, ID and text, for the concepts' fields of these names.
    """
    values = firing(scores, t, above)
    lowest = without_ancestors(pack, list(values))
    return sorted((describe(pack, p, values[p], **where) for p in lowest), key=lambda c: (-c.strength, c.probe))[:k]


def without_ancestors(pack: AnyPack, probes: Sequence[int]) -> list[int]:
    """Return the probes less those on the path shown of another of them, which says what they say. One that stands
    above by another parent is on no such path, and stays.
    """
    above = {ancestor for probe in probes for ancestor in pack.tree.path(probe)[:-1]}
    return [probe for probe in probes if probe not in above]


def told_reasons(unseen: Sequence[str], most: int) -> list[str]:
    """Return "N: reason" for the commonest reasons of tokens that are unseen, and how many reasons are left out."""
    reasons = Counter(reason for reason in unseen if reason)
    words = [f"{n:,}: {clip(reason, 200)}" for reason, n in reasons.most_common(most)]
    return words + ([f"and {len(reasons) - most:,} more reasons"] if len(reasons) > most else [])


def without_thresholds(pack: AnyPack) -> Mask:
    """Return the mask `[P]` of probes of packs without any alert threshold, of which nothing ever fires."""
    if isinstance(pack, PackGroup):
        mask = np.zeros(pack.n_probes, dtype=bool)
        for number, one in zip(pack.numbers, pack.packs.values(), strict=True):
            mask[number] = bool(one.alert_threshold.isnan().all())
        return mask
    return np.full(pack.n_probes, bool(pack.alert_threshold.isnan().all()))


def ranked(
    pack: AnyPack, scores: Scores, t: int, k: int, above: Doubles | None = None, **where: Any
) -> list[ConceptScore]:
    """Return the best-scoring active concepts of state `t`, at most `k`, of packs without any alert threshold.

    They are first, not firing. Equal scores go by the probe's number. `above` and `where` as in `leading`.
    """
    bare = without_thresholds(pack)
    if not bare.any():
        return []
    active = sorted(
        (-value, probe)
        for probe, value in zip(scores.active(t).tolist(), scores.active_scores(t).tolist(), strict=True)
        if bare[probe] and (above is None or value > above[probe])
    )
    return [describe(pack, probe, -value, **where) for value, probe in active[:k]]


@dataclass(frozen=True)
class Aggregate:
    """A running score: `values[i]` float64 after the token at `positions[i]`; `n_inactive` tokens counted as 0."""

    aggregate: str
    positions: Ints
    values: Doubles
    n_inactive: int


class Result:
    """Every real token of the output in the order of row, then position, each with its scores.

    `row`, `position`, `token_id`, `phase` `[M]` (phase 0 prompt, 1 generated by this `generate()`, to which what an
    earlier turn on its cache generated was given; `position` is a column of the output, so `out[row, position] ==
    token_id`), `scores` (a `Scores` of M states) and `coverage` (its `Coverage`).
    `reads`: what memories of the host read, where the run watched them (a follower `Routing`), else None.
    `host`: adapters, quantisation and devices of the model when the generation began; `host_changed`: they were others,
    weights were written to, or modules and configuration were set otherwise, before it ended or in an earlier turn on
    the same cache, so that its tokens come from different models. Not noticed are writes by way of `.data`, to a model
    that was made in inference mode, or to what lies within a quantised weight; what hooks of others do; and what is no
    attribute of a module: docs/doctor.md has the list. `requests`: of continuous batching, by row. Padding and what
    follows the end of a row are not tokens. `deployment`: the sha256 of the deployment by whose rules it was watched,
    None without one; where what is watched was changed in between, of the last.
    `watches`: (row, position, number), from which position of a row `run.watches[number]` says what was watched.
    """

    def __init__(
        self,
        pack: AnyPack,
        tokenizer: Any,
        tokens: RecordedTokens,
        host: HostState | None = None,
        *,
        host_changed: bool = False,
        requests: tuple[str, ...] = (),
        watches: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        self.pack, self.host, self.requests = pack, host, requests
        self.host_changed, self.watches = host_changed, watches
        self.row, self.position, self.token_id, self.phase = tokens.row, tokens.position, tokens.token_id, tokens.phase
        self.scores: Scores = tokens.scores
        self.reads, self._begins = tokens.reads, tokens.begins
        self.deployments: dict[int, str | None] = {}  # of each state in `watches`
        self._tokenizer = tokenizer

    @property
    def coverage(self) -> Coverage:
        """What was looked at, token by token; `.totals()` sums."""
        return self.scores.coverage

    @property
    def audit(self) -> Audit:
        """What the descent found of all there was, on the audited tokens (`DynamicProbeManager(audit_rate=...)`)."""
        return Audit.of(self.coverage)

    def before(self, position: int) -> Result:
        """Return the result of the tokens before a position alone."""
        position = _check_position(position)
        kept = np.flatnonzero(self.position < position)
        tokens = RecordedTokens(
            self.row[kept],
            self.position[kept],
            self.token_id[kept],
            self.phase[kept],
            self.scores.take(kept),
            None if self.reads is None else self.reads.take(kept),
            None if self._begins is None else self._begins[kept],
        )
        result = Result(
            self.pack,
            self._tokenizer,
            tokens,
            self.host,
            host_changed=self.host_changed,
            requests=self.requests,
            watches=tuple(one for one in self.watches if one[1] < position),
        )
        result.deployments = self.deployments
        return result

    def at(self, row: int, position: int) -> int:
        """The index of a token, for `scores.top(index)` and the other per-token answers."""
        row, position = check_count("row", row), _check_position(position)
        matches = np.flatnonzero((self.row == row) & (self.position == position))
        if not len(matches):
            raise ConfigError(f"row {row}, position {position} is not a token of this result (padding, or outside it)")
        return int(matches[0])

    def top(self, k: int = 10, row: int = 0, *, phase: str | None = None) -> list[ConceptScore]:
        """The `k` best concepts of a row, each once, at the token where it was best.

        Ranked by strength over the alert threshold where the pack is calibrated (a general concept has a high
        score at every token; what it exceeds its threshold by is news), by score where it is not; ties to the
        lower probe number, then the earlier token. `phase`: only "prompt" or "generated" tokens.
        """
        k = check_count("k", k)
        chosen = self._of_phase(self._of_row(row), phase)
        entry_token = self.scores.state_of
        entries = np.flatnonzero(chosen[entry_token])
        probes, values = self.scores.probes[entries], self.scores.values[entries]
        threshold = self.pack.alert_threshold.numpy()[probes]
        bare, rank = np.isnan(threshold), strength_or_score(values, threshold)  # those with a strength come first
        best: list[ConceptScore] = []
        taken: set[int] = set()
        for i in np.lexsort((entry_token[entries], probes, -rank, bare)).tolist():
            if len(best) == k:
                break
            probe, token = int(probes[i]), int(entry_token[entries[i]])
            if probe not in taken:
                taken.add(probe)
                best.append(describe(self.pack, probe, float(values[i]), **self.where(token)))
        return best

    def leading(self, index: int, k: int = 3) -> list[ConceptScore]:
        """The firing concepts of one token by strength, at most `k`: of those on one path the lowest alone."""
        index = self._check_index("index", index)
        return leading(self.pack, self.scores, index, check_count("k", k), **self.where(index))

    def reading(self, index: int, k: int = 1) -> list[Reading]:
        """What each memory of the host read at one token: of each its `k` most read slots; none of an unseen token.

        Raises `ConfigError` where the run watched no memory.
        """
        index = self._check_index("index", index)
        if self.reads is None:
            raise ConfigError(
                "no memory was watched: give attach(..., followers=[Routing()]), on a host with memory slots"
                " (docs/memory-hosts.md)"
            )
        return with_texts(self.reads.of(index, check_count("k", k)), self._tokenizer)

    def aggregate(
        self, concept: str | int, aggregate: str | Aggregator, row: int = 0, *, phase: str | None = "generated"
    ) -> Aggregate:
        """The running score of a concept over the tokens of a row: what a rule of `run.on(..., aggregate=)` compares.

        A token at which the concept was not active counts as 0 (`.n_inactive`), but is an error where the last tokens
        are a baseline; an unseen one is left out. Each of several sequences that are packed in a row begins anew.
        `phase`: "prompt", "generated" or None for every token. Raises `UnknownConcept`, `ConfigError`.
        """
        probe = self.pack.find(concept)
        aggregator = with_counts(named(aggregate), self.pack, [probe])
        chosen = self._of_phase(self._of_row(row), phase)
        if is_of_traffic(aggregator):
            raise ConfigError(
                f"{aggregator} compares with what all rows had generated by then, which a result does not know: its"
                " rule's events have the values, and `over` makes them of tokens in the order in which they came"
            )
        if any(self.coverage.unseen[i] == FORGOTTEN for i in np.flatnonzero(chosen)):
            raise ConfigError(
                f"scores of row {row} were forgotten (keep_tokens), so what came before the others is unknown: use a"
                " rule, or keep more"
            )
        chosen &= self.coverage.seen
        tokens, column = np.flatnonzero(chosen), self.scores.column(probe)
        n_inactive = len(tokens) - int(np.isin(tokens, self.scores.state_of[self.scores.probes == probe]).sum())
        if n_inactive and needs_every_token(aggregator):
            raise ConfigError(
                f"{self.pack.concepts[probe]['id']} was not evaluated at {n_inactive} of {len(tokens)} tokens, so"
                f" {aggregator} would compare with scores that nobody knows: give always_on, or a rule"
            )
        running = [over(aggregator, column[part][:, None])[:, 0] for part in self._sequences(tokens)]
        return Aggregate(str(aggregator), self.position[tokens], np.concatenate(running), n_inactive)

    def _sequences(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Divide tokens of a row by the sequences that are packed in it."""
        if self._begins is None:
            return [tokens]
        number = np.cumsum(self._begins)[tokens]
        return np.split(tokens, np.flatnonzero(np.diff(number)) + 1)

    def _of_row(self, row: int) -> np.ndarray:
        chosen = self.row == check_count("row", row)
        if not chosen.any():
            raise ConfigError(f"row {row} is not in this result: it has rows {sorted(set(self.row.tolist()))}")
        return np.asarray(chosen)

    def to_arrow(self) -> Any:
        """A `pyarrow.Table` with a line for each token and active concept. Needs the extra `corpus`.

        Columns row, position, token_id, phase, concept, level, score. Tokens without scores have no line: what
        was not seen stands in the schema's metadata, under `probemon`, beside the totals of the coverage.
        """
        pa = import_arrow("to_arrow")
        token = self.scores.state_of
        ids = pa.array([concept["id"] for concept in self.pack.concepts])
        unseen = [
            {"row": int(self.row[i]), "position": int(self.position[i]), "reason": reason}
            for i, reason in enumerate(self.coverage.unseen)
            if reason
        ]
        about = {"pack": self.pack.name, "coverage": self.coverage.totals(), "unseen": unseen}
        if self.deployment is not None:
            about["deployment"] = self.deployment
        columns = {
            "row": pa.array(self.row[token].astype(np.int32)),
            "position": pa.array(self.position[token].astype(np.int32)),
            "token_id": pa.array(self.token_id[token].astype(np.int32)),
            "phase": pa.DictionaryArray.from_arrays(pa.array(self.phase[token].astype(np.int8)), pa.array(PHASES)),
            "concept": pa.DictionaryArray.from_arrays(pa.array(self.scores.probes), ids),
            "level": pa.array(self.pack.tree.level[self.scores.probes].astype(np.int16)),
            "score": pa.array(self.scores.values),
        }
        return pa.table(columns).replace_schema_metadata({"probemon": json.dumps(about)})

    @property
    def deployment(self) -> str | None:
        """Return the sha256 of the deployment that held last, of whichever row; None where no file said so."""
        return self.deployments.get(max(number for *_, number in self.watches)) if self.watches else None

    def __len__(self) -> int:
        return len(self.row)

    def __repr__(self) -> str:
        totals = self.coverage.totals()
        return f"Result({totals['tokens']} tokens, {totals['unseen']} unseen, {len(self.scores.values)} scores)"

    def _repr_html_(self) -> str:
        from probemon.monitor.result_html import result_html  # it imports this module

        return result_html(self)

    def _of_phase(self, chosen: Mask, phase: str | None) -> Mask:
        if phase is None:
            return chosen
        if phase not in PHASES:
            raise ConfigError(f"phase {phase!r}: expected one of {', '.join(PHASES)}")
        return np.asarray(chosen & (self.phase == PHASES.index(phase)))

    def where(self, token: int) -> dict[str, Any]:
        """Return the position, the id and the text of a token, by its index."""
        token = self._check_index("token", token)
        token_id = int(self.token_id[token])
        text = str(token_id) if self._tokenizer is None else self._tokenizer.decode([token_id])
        return {"position": int(self.position[token]), "token_id": token_id, "token": text}

    def tokens_of(self, row: int, phase: str | None = None) -> Ints:
        """Return the indices of a row's tokens, of a phase alone or of both. Raises `ConfigError`."""
        return np.flatnonzero(self._of_phase(self._of_row(row), phase))

    def texts(self, tokens: Ints | Sequence[int]) -> list[str]:
        """Return what each of some tokens adds to the text; where several make one character, the last adds it.

        `tokens`: their indices. Together they are what the tokenizer makes of the tokens: of a character that is
        unfinished, U+FFFD. Raises `ConfigError`.
        """
        indices = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        if not isinstance(indices, Sequence):
            raise ConfigError(f"tokens is {shown(tokens)}: give the indices of tokens, as tokens_of returns them")
        ids = [int(self.token_id[self._check_index("tokens", index)]) for index in indices]
        if self._tokenizer is None:
            return [f"{token_id} " for token_id in ids]
        pieces = TokenTexts(self._decode)
        texts = [pieces.add(token_id) for token_id in ids]
        if texts:
            texts[-1] += pieces.finish()
        return texts

    def _check_index(self, name: str, value: object) -> int:
        """Return the index of a token of this result."""
        remedy = f"give the index of one of its {len(self.row)} tokens, from 0"
        return check_count(name, value, most=len(self.row) - 1, remedy=remedy)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def find_result(
    pack: AnyPack,
    tokenizer: Any,
    recordings: Sequence[Recording],
    out: Any,
    *,
    generation: int | None,
    keep_tokens: int | None,
) -> Result:
    """The scores of the one of `recordings` that belongs to `out`: see `MonitorRun.result`."""
    if not hasattr(out, "sequences") and (isinstance(out, Mapping) or hasattr(out, "request_id")):
        outputs = dict(out) if isinstance(out, Mapping) else {out.request_id: out}
        return _result_of_requests(pack, tokenizer, recordings, outputs, keep_tokens)
    sequences = getattr(out, "sequences", out)
    if (
        not isinstance(sequences, Tensor)
        or sequences.dim() != 2
        or sequences.dtype not in (torch.int64, torch.int32)
        or sequences.device.type == "meta"
    ):
        raise ConfigError(f"out is {described(sequences)}: give what generate() returned, ids [B, L]")
    ids = sequences.detach().cpu().numpy().astype(np.int64)
    recording = find_recording(recordings, ids, sequences, generation=generation, keep_tokens=keep_tokens)
    watches = tuple((row, *one) for row in range(len(ids)) for one in recording.watched_from())
    return Result(
        pack, tokenizer, recording.tokens(ids), recording.host, host_changed=recording.host_changed, watches=watches
    )


def _result_of_requests(
    pack: AnyPack, tokenizer: Any, recordings: Sequence[Recording], outputs: dict[str, Any], keep_tokens: int | None
) -> Result:
    """Row i is the i-th request of continuous batching, its positions those of its prompt and what was generated."""
    parts, hosts, changed = [], [], False
    watches: list[tuple[int, int, int]] = []
    for row, (request, output) in enumerate(outputs.items()):
        if getattr(output, "error", None) is not None:
            raise AlignmentError(
                f"request {request!r} failed in the host, so its tokens cannot be told: {output.error}"
            )
        ids = np.asarray([[*output.prompt_ids, *output.generated_tokens]], dtype=np.int64)
        recording = find_recording(recordings, ids, output, request, keep_tokens=keep_tokens)
        hosts.append(recording.host)
        watches += [(row, *one) for one in recording.watched_from()]
        changed = changed or recording.host_changed
        parts.append(recording.tokens(ids))
    if not parts:
        raise ConfigError("out has no requests: give what generate_batch() returned, or one of its outputs")
    return Result(
        pack,
        tokenizer,
        RecordedTokens.join(parts, pack.n_probes),
        hosts[0],
        host_changed=changed or any(host != hosts[0] for host in hosts),
        requests=tuple(outputs),
        watches=tuple(watches),
    )


def _check_position(position: object) -> int:
    # Those of a prompt of embeddings are below 0.
    return check_count("position", position, least=-MOST, remedy="give a whole number, a column of the output")
