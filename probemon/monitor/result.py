"""Result: the scores of each token of `generate`'s output.

result = run.result(out)
for concept in result.top(10, row=0):
    print(concept.score, " > ".join(concept.path), concept.token, concept.position)
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
from probemon.core.function_scores import beside
from probemon.core.hierarchy import Ints, Mask
from probemon.core.memory_reads import Reading, with_texts
from probemon.core.scores import PHASES, Coverage, ModelState, Scores
from probemon.engine.audit import Audit
from probemon.errors import AlignmentError, ConfigError, MissingExtra
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

    `strength`: logit of the score minus logit of the threshold, NaN without one
    `precision`: share of right fires in calibration, NaN if unknown
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
    """Return a `ConceptScore`. A `threshold` below the alert threshold has no known precision."""
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
    """Return `{probe: score}` of the firing probes of state `t`, ascending; `above` as in `leading`."""
    values = dict(zip(scores.active(t).tolist(), scores.active_scores(t).tolist(), strict=True))
    return {p: values[p] for p in scores.fired(t).tolist() if above is None or values[p] > above[p]}


def leading(
    pack: AnyPack, scores: Scores, t: int, k: int, above: Doubles | None = None, **where: Any
) -> list[ConceptScore]:
    """Return at most `k` firing concepts by strength, only the lowest of each path.

    `above [P]`: further thresholds; inf excludes a concept
    `where`: fields of the token
    """
    values = firing(scores, t, above)
    lowest = without_ancestors(pack, list(values))
    return sorted((describe(pack, p, values[p], **where) for p in lowest), key=lambda c: (-c.strength, c.probe))[:k]


def without_ancestors(pack: AnyPack, probes: Sequence[int]) -> list[int]:
    """Return the probes without those on the displayed path of another. An ancestor by a second parent stays."""
    above = {ancestor for probe in probes for ancestor in pack.tree.path(probe)[:-1]}
    return [probe for probe in probes if probe not in above]


def told_reasons(unseen: Sequence[str], most: int) -> list[str]:
    """Return the commonest reasons of unseen tokens, and the number of others."""
    reasons = Counter(reason for reason in unseen if reason)
    words = [f"{n:,}: {clip(reason, 200)}" for reason, n in reasons.most_common(most)]
    return words + ([f"and {len(reasons) - most:,} more reasons"] if len(reasons) > most else [])


def without_thresholds(pack: AnyPack) -> Mask:
    """Return the mask `[P]` of probes whose pack has no alert thresholds."""
    if isinstance(pack, PackGroup):
        mask = np.zeros(pack.n_probes, dtype=bool)
        for number, one in zip(pack.numbers, pack.packs.values(), strict=True):
            mask[number] = bool(one.alert_threshold.isnan().all())
        return mask
    return np.full(pack.n_probes, bool(pack.alert_threshold.isnan().all()))


def ranked(
    pack: AnyPack, scores: Scores, t: int, k: int, above: Doubles | None = None, **where: Any
) -> list[ConceptScore]:
    """Return the `k` best active concepts, firing or not, of packs without alert thresholds.

    `above`, `where`: as in `leading`
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
    """A running score: `values[i]` float64 after `positions[i]`; `n_inactive` tokens counted as 0."""

    aggregate: str
    positions: Ints
    values: Doubles
    n_inactive: int


class Result:
    """Every token of the output by row, then position, without padding.

    - `row`, `position`, `token_id`, `phase`: `[M]`; phase 0: prompt and earlier turns, 1: generated; `out[row,
      position] == token_id`
    - `scores`, `coverage`: of M states
    - `reads`: of the model's memories, with a follower `Routing`
    - `functions`: `FunctionScores` of M states by name, with function probes
    - `host`: the model's adapters, quantisation and devices at the beginning
    - `model_changed`: these, weights, modules or configuration changed since; docs/operations.md lists exceptions
    - `requests`: in continuous batching, by row
    - `deployment`: sha256 of the last one in force
    - `watches`: `(row, position, number)`: from there by `run.watches[number]`
    """

    def __init__(
        self,
        pack: AnyPack,
        tokenizer: Any,
        tokens: RecordedTokens,
        host: ModelState | None = None,
        *,
        model_changed: bool = False,
        requests: tuple[str, ...] = (),
        watches: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        self.pack, self.host, self.requests = pack, host, requests
        self.model_changed, self.watches = model_changed, watches
        self.row, self.position, self.token_id, self.phase = tokens.row, tokens.position, tokens.token_id, tokens.phase
        self.scores: Scores = tokens.scores
        self.reads, self._begins, self.functions = tokens.reads, tokens.begins, dict(tokens.functions)
        self.deployments: dict[int, str | None] = {}
        self._tokenizer = tokenizer

    @property
    def coverage(self) -> Coverage:
        """Return the coverage of each token; `.totals()` sums."""
        return self.scores.coverage

    @property
    def audit(self) -> Audit:
        """Return the audit of the descent (`audit_rate=...`)."""
        return Audit.of(self.coverage)

    def before(self, position: int) -> Result:
        """Return the result of the tokens before a position."""
        position = _check_position(position)
        indices = np.flatnonzero(self.position < position)
        tokens = RecordedTokens(
            self.row[indices],
            self.position[indices],
            self.token_id[indices],
            self.phase[indices],
            self.scores.take(indices),
            None if self.reads is None else self.reads.take(indices),
            None if self._begins is None else self._begins[indices],
            {name: one.take(indices) for name, one in self.functions.items()},
        )
        result = Result(
            self.pack,
            self._tokenizer,
            tokens,
            self.host,
            model_changed=self.model_changed,
            requests=self.requests,
            watches=tuple(one for one in self.watches if one[1] < position),
        )
        result.deployments = self.deployments
        return result

    def at(self, row: int, position: int) -> int:
        """Return the index of a token."""
        row, position = check_count("row", row), _check_position(position)
        matches = np.flatnonzero((self.row == row) & (self.position == position))
        if not len(matches):
            raise ConfigError(f"row {row}, position {position} is not a token of this result (padding, or outside it)")
        return int(matches[0])

    def top(self, k: int = 10, row: int = 0, *, phase: str | None = None) -> list[ConceptScore]:
        """Return the `k` best concepts of a row, each once, at its best token.

        By strength, since general concepts score high everywhere, or by score without thresholds; then lower probe,
        earlier token. `phase`: "prompt" or "generated"
        """
        k = check_count("k", k)
        chosen = self._of_phase(self._of_row(row), phase)
        entry_token = self.scores.state_of
        entries = np.flatnonzero(chosen[entry_token])
        probes, values = self.scores.probes[entries], self.scores.values[entries]
        threshold = self.pack.alert_threshold.numpy()[probes]
        bare, rank = np.isnan(threshold), strength_or_score(values, threshold)
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
        """Return at most `k` firing concepts of a token by strength, only the lowest of each path."""
        index = self._check_index("index", index)
        return leading(self.pack, self.scores, index, check_count("k", k), **self.where(index))

    def reading(self, index: int, k: int = 1) -> list[Reading]:
        """Return the `k` most read slots of each memory at a token. Raises `ConfigError` without a watched memory."""
        index = self._check_index("index", index)
        if self.reads is None:
            raise ConfigError(
                "no memory was watched: give attach(..., followers=[Routing()]), on a model with memory slots"
                " (docs/memory-and-routing.md)"
            )
        return with_texts(self.reads.of(index, check_count("k", k)), self._tokenizer)

    def aggregate(
        self, concept: str | int, aggregate: str | Aggregator, row: int = 0, *, phase: str | None = "generated"
    ) -> Aggregate:
        """Return the running score of a concept in a row, as rules compare it.

        Inactive tokens count as 0, or are an error if the aggregate needs every token; unseen tokens are left out.
        Packed sequences begin again. `phase`: "prompt", "generated" or None. Raises `UnknownConcept`, `ConfigError`.
        """
        probe = self.pack.find(concept)
        aggregator = with_counts(named(aggregate), self.pack, [probe])
        chosen = self._of_phase(self._of_row(row), phase)
        if is_of_traffic(aggregator):
            raise ConfigError(
                f"{aggregator} compares with the tokens of all rows up to then, which a result does not have: read the"
                " values in its rule's events, or compute them with `over` from tokens in the order in which they came"
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
                f" {aggregator} would compare with unknown scores: give always_on, or a rule"
            )
        running = [over(aggregator, column[part][:, None])[:, 0] for part in self._sequences(tokens)]
        return Aggregate(str(aggregator), self.position[tokens], np.concatenate(running), n_inactive)

    def _sequences(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Split tokens of a row by packed sequence."""
        if self._begins is None:
            return [tokens]
        number = np.cumsum(self._begins)[tokens]
        return np.split(tokens, np.flatnonzero(np.diff(number)) + 1)

    def _of_row(self, row: int) -> np.ndarray:
        chosen = self.row == check_count("row", row)
        if not chosen.any():
            raise ConfigError(f"row {row} is not in this result: it has rows {sorted(set(self.row.tolist()))}")
        return np.asarray(chosen)

    def to_pandas(self) -> Any:
        """Return `to_arrow(texts=True)` as a data frame. Needs pandas and the extra `corpus`.

        result.to_pandas().query("fired").groupby("concept").strength.max()
        """
        try:
            import pandas  # noqa: F401
        except ImportError:
            raise MissingExtra("to_pandas needs pandas: pip install pandas, or use to_arrow(texts=True)") from None
        return self.to_arrow(texts=True).to_pandas()

    def to_arrow(self, *, texts: bool = False) -> Any:
        """Return a `pyarrow.Table` with a row for each token and active concept, and for each token and function probe
        that gave it a number (at level 0). Needs the extra `corpus`.

        `texts`: also the text of each token, the concept's path ("animal > mammal"), its alert threshold (null without
        one), the strength of the score and whether it fires.

        Schema metadata `probemon`: unseen tokens and coverage totals.
        """
        pa = import_arrow("to_arrow")
        scores = beside(self.scores, list(self.functions.values()))
        token, levels = scores.state_of, np.append(self.pack.tree.level, np.zeros(len(self.functions), np.int64))
        ids = pa.array([*(concept["id"] for concept in self.pack.concepts), *self.functions])
        unseen = [
            {"row": int(self.row[i]), "position": int(self.position[i]), "reason": reason}
            for i, reason in enumerate(self.coverage.unseen)
            if reason
        ]
        metadata = {"pack": self.pack.name, "coverage": self.coverage.totals(), "unseen": unseen}
        if self.deployment is not None:
            metadata["deployment"] = self.deployment
        if self.functions:
            metadata["functions_unseen"] = {
                name: dict(Counter(filter(None, one.unseen))) for name, one in self.functions.items()
            }
        columns = {
            "row": pa.array(self.row[token].astype(np.int32)),
            "position": pa.array(self.position[token].astype(np.int32)),
            "token_id": pa.array(self.token_id[token].astype(np.int32)),
            "phase": pa.DictionaryArray.from_arrays(pa.array(self.phase[token].astype(np.int8)), pa.array(PHASES)),
            "concept": pa.DictionaryArray.from_arrays(pa.array(scores.probes), ids),
            "level": pa.array(levels[scores.probes].astype(np.int16)),
            "score": pa.array(scores.values),
            **(self._texts_of(pa, scores) if texts else {}),
        }
        return pa.table(columns).replace_schema_metadata({"probemon": json.dumps(metadata)})

    def _texts_of(self, pa: Any, scores: Scores) -> dict[str, Any]:
        """`scores`: of the packs and of functions."""
        token, probes, n = scores.state_of, scores.probes, self.pack.n_probes
        by_token = [text for row in np.unique(self.row).tolist() for text in self.texts(self.tokens_of(row))]
        used, places = np.unique(probes, return_inverse=True)
        names = list(self.functions)
        all_paths = [names[probe - n] if probe >= n else " > ".join(self.pack.path(probe)) for probe in used.tolist()]
        paths = pa.array(all_paths, pa.string())
        own = np.array([one.threshold for one in self.functions.values()], dtype=np.float32)
        thresholds = np.append(self.pack.alert_threshold.numpy(), own)[probes]
        return {
            "token": pa.array([by_token[at] for at in token.tolist()], pa.string()),
            "path": pa.DictionaryArray.from_arrays(pa.array(places.astype(np.int32)), paths),
            "threshold": pa.array(thresholds, mask=np.isnan(thresholds)),
            "strength": pa.array(strength_of(scores.values, thresholds), from_pandas=True),
            "fired": pa.array(scores.fired_mask),
        }

    @property
    def deployment(self) -> str | None:
        """Return the sha256 of the last deployment in force, or None."""
        return self.deployments.get(max(number for *_, number in self.watches)) if self.watches else None

    def __len__(self) -> int:
        return len(self.row)

    def __repr__(self) -> str:
        totals = self.coverage.totals()
        return f"Result({totals['tokens']} tokens, {totals['unseen']} unseen, {len(self.scores.values)} scores)"

    def _repr_html_(self) -> str:
        from probemon.monitor.result_html import result_html  # circular import

        return result_html(self)

    def _of_phase(self, chosen: Mask, phase: str | None) -> Mask:
        if phase is None:
            return chosen
        if phase not in PHASES:
            raise ConfigError(f"phase {phase!r}: expected one of {', '.join(PHASES)}")
        return np.asarray(chosen & (self.phase == PHASES.index(phase)))

    def where(self, token: int) -> dict[str, Any]:
        """Return the position, id and text of a token."""
        token = self._check_index("token", token)
        token_id = int(self.token_id[token])
        text = str(token_id) if self._tokenizer is None else self._tokenizer.decode([token_id])
        return {"position": int(self.position[token]), "token_id": token_id, "token": text}

    def tokens_of(self, row: int, phase: str | None = None) -> Ints:
        """Return the indices of a row's tokens. Raises `ConfigError`."""
        return np.flatnonzero(self._of_phase(self._of_row(row), phase))

    def texts(self, tokens: Ints | Sequence[int]) -> list[str]:
        """Return the text that each of `tokens` (indices) adds; a split character comes with its last token.

        An unfinished character becomes U+FFFD. Raises `ConfigError`.
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
    """Return the result of the recording that matches `out`."""
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
        pack, tokenizer, recording.tokens(ids), recording.host, model_changed=recording.model_changed, watches=watches
    )


def _result_of_requests(
    pack: AnyPack, tokenizer: Any, recordings: Sequence[Recording], outputs: dict[str, Any], keep_tokens: int | None
) -> Result:
    parts, states, changed = [], [], False
    watches: list[tuple[int, int, int]] = []
    for row, (request, output) in enumerate(outputs.items()):
        if getattr(output, "error", None) is not None:
            raise AlignmentError(f"request {request!r} failed in the model, so its tokens are unknown: {output.error}")
        ids = np.asarray([[*output.prompt_ids, *output.generated_tokens]], dtype=np.int64)
        recording = find_recording(recordings, ids, output, request, keep_tokens=keep_tokens)
        states.append(recording.host)
        watches += [(row, *one) for one in recording.watched_from()]
        changed = changed or recording.model_changed
        parts.append(recording.tokens(ids))
    if not parts:
        raise ConfigError("out has no requests: give what generate_batch() returned, or one of its outputs")
    return Result(
        pack,
        tokenizer,
        RecordedTokens.join(parts, pack.n_probes),
        states[0],
        model_changed=changed or any(state != states[0] for state in states),
        requests=tuple(outputs),
        watches=tuple(watches),
    )


def _check_position(position: object) -> int:
    # Positions of a prompt of embeddings are negative.
    return check_count("position", position, least=-MOST, remedy="give a whole number, a column of the output")
