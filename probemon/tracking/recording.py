"""Recording: tokens and scores of one generation or document.

recording = Recording(SequenceColumns(prompt_columns=12), offset=0, n_probes=363)
recording.add(placed, scores)
tokens = recording.tokens(sequences)          # every real token of the output
recording.forget(n, keep_ids=64)              # drops up to n scores
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from probemon.core.function_scores import FunctionScores, join_functions
from probemon.core.hierarchy import Mask
from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import GENERATED, PROMPT, ModelState, Scores
from probemon.errors import AlignmentError
from probemon.host.changes import ModelMark
from probemon.tracking.align import NEVER, NO_ID, Ints, PlacedTokens, SequenceColumns
from probemon.tracking.beams import Beams
from probemon.tracking.forgotten_ids import ForgottenIds

LAST = "the last generated token is never run by the host"
BEFORE = "it came in a cache that this run did not see being filled, or whose rows it cannot tell apart"
SHARED = "its keys and values were shared with another request, so the host did not run it (allow_block_sharing)"
GAP = "no forward of the host showed it"
FORGOTTEN = "what was known of it is no longer kept (keep_tokens)"
_AGE = itertools.count()
# small batches are joined at this number
_PIECES = 256


@dataclass(frozen=True)
class RecordedTokens:
    """Real tokens `[M]` by row, then position (a column of the output); one state of `scores` each.

    `reads`: memory reads, or None. `begins`: first token of a packed sequence, or None. `functions`: by name of a
    function probe.
    """

    row: Ints
    position: Ints
    token_id: Ints
    phase: Ints
    scores: Scores
    reads: MemoryReads | None = None
    begins: Mask | None = None
    functions: Mapping[str, FunctionScores] = field(default_factory=dict)

    @staticmethod
    def join(parts: Sequence[RecordedTokens], n_probes: int) -> RecordedTokens:
        """Join recordings of one row each."""
        row = np.concatenate([np.full(len(part.row), i) for i, part in enumerate(parts)])
        position, token_id, phase = (
            np.concatenate([getattr(part, name) for part in parts]) for name in ("position", "token_id", "phase")
        )
        return RecordedTokens(
            row,
            position,
            token_id,
            phase,
            Scores.join([part.scores for part in parts], n_probes, parts[0].scores.report_top_k),
            functions=join_functions([part.functions for part in parts], [len(part.row) for part in parts]),
        )


@dataclass(frozen=True)
class Turn:
    """A turn seen from a later one, up to column `end`. `origin`: its row for each later row; None if equal."""

    recording: Recording
    end: int = int(NEVER)
    origin: Ints | None = None

    def seen_from(self, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        """Return the entries that the later turn continues, and their later rows."""
        if self.origin is None:
            entries = np.flatnonzero(columns < self.end)
            return entries, rows[entries]
        entries, later_rows = np.nonzero((rows[:, None] == self.origin) & (columns < self.end)[:, None])
        return entries, later_rows


@dataclass(eq=False)
class Recording:
    """Tokens and scores in order of arrival. Only its methods assign attributes.

    - `earlier`, `earlier_rows [B]`: the previous turn, and its rows (None if equal)
    - `output`, `ids [B, L]`: of `generate()`
    - `retained [B, P]`: sets for the next generated token
    - `request`: id in continuous batching
    - `before`: why columns before the first were not seen
    - `prompt [b, L]`: ids from column `offset` on, if partly cached
    - `mark`, `mark_after`: the model at begin and end; `switched`: adapters differed in between
    - `done`: complete; `cancelled`: nobody wanted the rest
    - `n_entries`, `n_forgotten`: tokens added and dropped; `forgotten`: end of the dropped columns
    - `changed_before`: the model changed in forgotten turns
    - `ages`: order of batches in this process
    - `watches`: first column and number of each watched state
    - `forgotten_ids`: ids without scores, earlier turns included
    - `why_unseen`, `n_generated`: counts, forgotten tokens included
    """

    call: SequenceColumns
    offset: int
    n_probes: int
    earlier: Recording | None = None
    earlier_rows: Ints | None = None
    output: Any = None
    ids: Ints | None = None
    retained: Mask | None = None
    beams: Beams | None = None
    host: ModelState | None = None
    mark: ModelMark | None = None
    mark_after: ModelMark | None = None
    switched: bool = False
    changed_before: bool = False
    number: int = 0
    request: str = ""
    before: str = BEFORE
    prompt: Ints | None = None
    done: bool = False
    cancelled: bool = False
    n_entries: int = 0
    n_generated: int = 0
    why_unseen: Counter[str] = field(default_factory=Counter)
    n_forgotten: int = 0
    forgotten: int = 0
    forgotten_ids: ForgottenIds = field(default_factory=ForgottenIds)
    _n_small: int = 0
    placed: list[PlacedTokens] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    reads: list[MemoryReads] = field(default_factory=list)  # empty without memories
    functions: list[Mapping[str, FunctionScores]] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    watches: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        placed: PlacedTokens,
        scores: Scores,
        reads: MemoryReads | None = None,
        watch: int = 0,
        functions: Mapping[str, FunctionScores] | None = None,
    ) -> None:
        """Add tokens with scores, memory reads, the watched state's number and scores of function probes."""
        if not self.watches or self.watches[-1][1] != watch:
            self.watches.append((int(placed.columns.min()), watch))
        self.n_entries += len(placed)
        self.n_generated += len(placed) if placed.phase == GENERATED else 0
        if not scores.coverage.all_seen:
            self.why_unseen.update(filter(None, scores.coverage.unseen))
        self.functions.append(functions or {})  # first: other threads read as many as there are in `placed`
        self.placed.append(placed)
        self.scores.append(scores)
        if reads is not None:
            self.reads.append(reads)
        self.ages.append(next(_AGE))
        self._n_small += 1
        if self._n_small == _PIECES:
            self._join()

    def add_forgotten(self, n: int) -> None:
        """Count tokens that are not kept."""
        self.n_entries += n
        self.n_forgotten += n

    def begin(self, column: int, n_rows: int, earlier: Recording | None, rows: Ints | None = None) -> None:
        """Set the begin; `earlier` has the columns before it, row `rows[i]` for row `i`."""
        self.call.begin(column, n_rows)
        if earlier is not None:
            self.earlier_rows = rows  # first: another thread may read
            self.earlier = earlier

    def turns(self) -> Iterator[Turn]:
        """Yield this and earlier turns, newest first."""
        turn: Turn | None = Turn(self)
        while turn is not None:
            recording, rows = turn.recording, turn.recording.earlier_rows
            # before the yield: another thread may drop it
            earlier = recording.earlier
            yield turn
            if earlier is None:
                return
            if turn.origin is not None:
                rows = turn.origin if rows is None else rows[turn.origin]
            turn = Turn(earlier, min(turn.end, recording.call.first_column), rows)

    def check_rows(self, mask: Ints) -> None:
        """Raise `AlignmentError` if `mask [B, L]` shows earlier padding as a token."""
        end = min(self.call.first_column, mask.shape[1])
        first, was_run = end, np.zeros((len(mask), end), dtype=bool)
        for turn in itertools.islice(self.turns(), 1, None):
            for placed in turn.recording.placed:
                entries, rows = turn.seen_from(placed.rows, placed.columns)
                was_run[rows, placed.columns[entries]] = True
            first = min(end, max(turn.recording.call.first_column, turn.recording.forgotten))
            if turn.recording.forgotten:
                break
        rows, columns = np.nonzero((mask[:, first:end] != 0) & ~was_run[:, first:])
        if len(rows):
            raise AlignmentError(
                f"row {rows[0]}: column {first + columns[0]} is a token by its attention_mask, and was padding when the"
                " cache was made: give each row of the cache its own mask of the turn before, with ones after it"
            )

    def scores_alike(self, one: int, other: int, end: int, of: Recording | None = None) -> bool:
        """True if two rows (the second maybe of recording `of`) have equal tokens and scores before `end`.

        Compares probes active in both: activity depends on the phase.
        """
        columns, ids, mine = self._row_before(one, end)
        its_columns, its_ids, its = (of or self)._row_before(other, end)
        if not (np.array_equal(columns, its_columns) and np.array_equal(ids, its_ids)):
            return False
        if [bool(why) for why in mine.coverage.unseen] != [bool(why) for why in its.coverage.unseen]:
            return False
        keys, its_keys = (one.state_of * self.n_probes + one.probes for one in (mine, its))
        both, at, its_at = np.intersect1d(keys, its_keys, assume_unique=True, return_indices=True)
        comparable = set(mine.state_of.tolist()) & set(its.state_of.tolist())
        return comparable == set((both // self.n_probes).tolist()) and np.allclose(
            mine.values[at], its.values[its_at], rtol=0, atol=1e-5, equal_nan=True
        )

    def _row_before(self, row: int, end: int) -> tuple[Ints, Ints, Scores]:
        rows, columns, ids, _, scores, *_ = self._joined(end - self.offset)
        entries = np.flatnonzero(rows == row)
        entries = entries[np.argsort(columns[entries], kind="stable")]
        return columns[entries], ids[entries], scores.take(entries)

    def retained_of(self, rows: Ints) -> Mask:
        """Return a copy of retained sets `[len(rows), P]`."""
        return self._retained()[rows]

    def retain(self, rows: Ints, sets: Mask) -> None:
        """Replace the retained sets of `rows`."""
        self._retained()[rows] = sets

    def ids_before(self, row: int, end: int) -> Ints | None:
        """Return a row's prompt ids from `offset` to `end`, or None."""
        if self.prompt is None or end > self.offset + self.prompt.shape[1]:
            return None
        # Answers to one prompt are adjacent.
        ids: Ints = self.prompt[row * len(self.prompt) // max(1, self.call.n_rows), : max(0, end - self.offset)]
        return ids[self._real(self.call.n_rows, len(ids))[row]]

    def n_before(self) -> int:
        """Return the number of cached tokens that no turn showed."""
        first, n_rows = self.call.first_column, self.call.n_rows
        if first <= self.offset:
            return 0
        hidden = self._real(n_rows, first - self.offset)
        hidden[:, : max(0, self._forgotten_before() - self.offset)] = False
        for turn in itertools.islice(self.turns(), 1, None):
            for placed in list(turn.recording.placed):
                entries, rows = turn.seen_from(placed.rows, placed.columns)
                inside = placed.columns[entries] >= self.offset
                hidden[rows[inside], placed.columns[entries[inside]] - self.offset] = False
        return int(hidden.sum())

    def keep_output(self, output: Any, ids: Ints, mark: ModelMark) -> None:
        """Keep output, ids `[B, L]` and the model's mark."""
        self.output, self.ids = output, ids
        self.keep_mark(mark)

    def keep_mark(self, mark: ModelMark) -> None:
        """Keep the model's mark at the end."""
        self.mark_after = mark

    def note_adapters(self) -> None:
        """Note switched adapters."""
        self.switched = self.switched or (self.mark is not None and self.mark.switched())

    def cancel(self) -> None:
        """Mark as ended early because nobody wanted the rest."""
        self.cancelled = True

    def close(self) -> None:
        """Mark as complete."""
        self.done = True

    def forget(self, n: int, keep_ids: int) -> int:
        """Drop up to `n` oldest scores in whole pieces; return the number. `keep_ids` ids per row stay."""
        dropped, pieces = 0, 0
        while pieces < len(self.placed) and dropped + len(self.placed[pieces]) <= n:
            columns = self.placed[pieces].columns
            self.forgotten = max(self.forgotten, int(columns.max(initial=-1)) + 1)
            dropped, pieces = dropped + len(columns), pieces + 1
        # Concurrent readers may see a token twice, but never miss it.
        for placed in self.placed[:pieces]:
            self.forgotten_ids.add((placed.rows, placed.columns, placed.ids), keep_ids)
        del self.placed[:pieces], self.scores[:pieces], self.ages[:pieces], self.reads[:pieces]
        del self.functions[:pieces]
        self.n_forgotten += dropped
        if not self.placed and self.earlier is not None:  # earlier turns are forgotten first
            self.changed_before = self.model_changed
            self._take_ids_of_earlier_turns(keep_ids)
            self.forgotten, self.earlier = self._forgotten_before(), None
        self._n_small = min(self._n_small, len(self.placed))
        return dropped

    @property
    def model_changed(self) -> bool:
        """True if the model changed since the begin, or in an earlier turn."""
        turns = [turn.recording for turn in self.turns()]
        if any(turn.switched or turn.changed_before for turn in turns):
            return True
        marks = [mark for turn in turns for mark in (turn.mark, turn.mark_after)]
        return any(self.mark is not None and mark is not None and mark.differs(self.mark) for mark in marks)

    @property
    def n_kept(self) -> int:
        """Tokens with scores."""
        return self.n_entries - self.n_forgotten

    def tokens(self, sequences: Ints) -> RecordedTokens:
        """Return every real token of `sequences [B, L]`. Raises `AlignmentError` if others were recorded."""
        wrong = self.mismatch(sequences)
        if wrong is not None:
            raise AlignmentError(wrong)
        n_rows, length = sequences.shape
        row, column, _, phase, scores, reads, functions = self._joined(length)
        index = np.full((n_rows, length), -1, dtype=np.int64)
        phases = np.full((n_rows, length), PROMPT, dtype=np.int64)
        if self.call.prompt_columns is not None:
            phases[:, self.call.prompt_columns - self.offset :] = GENERATED
        if self.beams is None:
            inside = column >= self.offset
            index[row[inside], column[inside] - self.offset] = np.flatnonzero(inside)
            if self.call.prompt_columns is None:  # else earlier output is prompt
                phases[row[inside], column[inside] - self.offset] = phase[inside]
            # A later mask may hide scored tokens.
            real = self._real(n_rows, length) | (index >= 0)
            last = np.full(n_rows, length - 1)
        else:
            real, last = self._follow_beams(self.beams, sequences, row, column, phase, index)
        at_row, at = np.nonzero(real)
        reasons, forgotten = {}, self._forgotten_before()
        for i in np.flatnonzero(index[at_row, at] < 0).tolist():
            is_last = phases[at_row[i], at[i]] == GENERATED and at[i] == last[at_row[i]]
            at_column = at[i] + self.offset
            if is_last:
                reasons[i] = LAST
            elif at_column < forgotten:
                reasons[i] = FORGOTTEN
            else:
                reasons[i] = self.before if at_column < self.call.first_column else GAP
        entries = index[at_row, at]
        return RecordedTokens(
            at_row,
            at,
            sequences[at_row, at],
            phases[at_row, at],
            scores.take(entries, reasons),
            None if reads is None else reads.take(entries, self.offset),
            self._begins(at_row, at),
            {name: one.take(entries, reasons) for name, one in functions.items()},
        )

    def _begins(self, row: Ints, position: Ints) -> Mask | None:
        """Which tokens begin a packed sequence; None without packing."""
        packed = [(placed, placed.begins) for placed in self.placed if placed.begins is not None]
        if not packed:
            return None
        firsts = {
            place
            for placed, begins in packed
            for place in zip(placed.rows[begins].tolist(), (placed.columns[begins] - self.offset).tolist(), strict=True)
        }
        at = zip(row.tolist(), position.tolist(), strict=True)
        return np.array([place in firsts for place in at], dtype=bool)

    def _retained(self) -> Mask:
        if self.retained is None:  # the first forward sets n_rows
            self.retained = np.zeros((self.call.n_rows, self.n_probes), dtype=bool)
        return self.retained

    def _join(self) -> None:
        """Join the newest small pieces of one phase."""
        phase, n = self.placed[-1].phase, 1
        while n < self._n_small and self.placed[-n - 1].phase == phase:
            n += 1
        self._n_small = 0
        placed = self.placed[-n:]
        rows, columns, offsets, ids = (
            np.concatenate([getattr(p, name) for p in placed]) for name in ("rows", "columns", "offsets", "ids")
        )
        begins = None
        if any(p.begins is not None for p in placed):
            begins = np.concatenate([np.zeros(len(p), bool) if p.begins is None else p.begins for p in placed])
        self.placed[-n:] = [
            PlacedTokens(rows, columns, offsets, ids, phase, provisional=placed[0].provisional, begins=begins)
        ]
        del self.ages[len(self.ages) - n + 1 :]
        self.functions[-n:] = [join_functions(self.functions[-n:], [len(p) for p in placed])]
        self.scores[-n:] = [Scores.join(self.scores[-n:], self.n_probes, self.scores[-1].report_top_k)]
        if self.reads:
            self.reads[-n:] = [MemoryReads.join(self.reads[-n:])]

    def _forgotten_before(self) -> int:
        return max(turn.recording.forgotten for turn in self.turns())

    def _take_ids_of_earlier_turns(self, n: int) -> None:
        pieces = self.forgotten_ids.pieces()
        for turn in itertools.islice(self.turns(), 1, None):
            before = []
            for rows, columns, ids in turn.recording.forgotten_ids.pieces():
                # Cropping a cache drops columns.
                entries, later_rows = turn.seen_from(rows, columns)
                before.append((later_rows, columns[entries], ids[entries]))
            pieces[:0] = before
        self.forgotten_ids = ForgottenIds()
        for piece in pieces:
            self.forgotten_ids.add(piece, n)

    def _follow_beams(
        self, beams: Beams, sequences: Ints, row: Ints, column: Ints, phase: Ints, index: Ints
    ) -> tuple[Mask, Ints]:
        """Fill `index` for returned sequences; return which entries are tokens, and last positions."""
        n_rows, length = sequences.shape
        each = n_rows // (self.call.n_rows // beams.n_beams)
        real, last = np.zeros((n_rows, length), dtype=bool), np.zeros(n_rows, dtype=np.int64)
        prompt = np.flatnonzero((column < self.offset + beams.begin) & (column >= self.offset))
        padding = self._real(self.call.n_rows, length)
        for r in range(n_rows):
            b = r // each
            own_prompt = prompt[row[prompt] == b * beams.n_beams]
            index[r, column[own_prompt] - self.offset] = own_prompt
            entries, n = beams.follow(b, sequences[r, beams.begin :])
            # Forgotten entries come first, so they become negative.
            index[r, beams.begin : beams.begin + len(entries)] = np.maximum(
                np.asarray(entries, dtype=np.int64) - self.n_forgotten, -1
            )
            last[r] = beams.begin + n - 1
            real[r, : beams.begin] = padding[b * beams.n_beams, : beams.begin]
            real[r, beams.begin : beams.begin + n] = True
        return real, last

    def _real(self, n_rows: int, length: int) -> Mask:
        """Which entries are tokens: no padding, nothing after a row's end."""
        real = np.ones((n_rows, length), dtype=bool)
        mask = self.call.mask
        if mask is not None:
            n_columns = min(length, mask.shape[1] - self.offset)
            real[:, :n_columns] = mask[:, self.offset : self.offset + n_columns] != 0
        last = np.where(self.call.last_column == NEVER, length, self.call.last_column - self.offset)
        return real & (np.arange(length) <= last[:, None])

    def _joined(
        self, length: int
    ) -> tuple[Ints, Ints, Ints, Ints, Scores, MemoryReads | None, dict[str, FunctionScores]]:
        """Row, column, id, phase and scores of this and earlier turns."""
        rows, columns, ids, phases, keep = ([np.zeros(0, dtype=np.int64)] for _ in range(5))
        scores, reads, n = list[Scores](), list[MemoryReads](), 0
        functions, sizes = list[Mapping[str, FunctionScores]](), list[int]()
        for turn in self.turns():
            if turn.recording is self:
                turn = Turn(self, length + self.offset)
            pieces = list(turn.recording.placed)
            scores += list(turn.recording.scores)[: len(pieces)]
            reads += list(turn.recording.reads)[: len(pieces)]
            functions += list(turn.recording.functions)[: len(pieces)]
            sizes += map(len, pieces)
            for piece in pieces:
                entries, later_rows = turn.seen_from(piece.rows, piece.columns)
                rows.append(later_rows)
                columns.append(piece.columns[entries])
                ids.append(piece.ids[entries])
                phases.append(np.full(len(entries), piece.phase))
                keep.append(n + entries)
                n += len(piece)
        which = np.concatenate(keep)
        joined = Scores.join(scores, self.n_probes, scores[0].report_top_k if scores else 10).take(which)
        read = MemoryReads.join(reads).take(which) if reads else None
        by_function = {name: one.take(which) for name, one in join_functions(functions, sizes).items()}
        row, column, at_ids, phase = map(np.concatenate, (rows, columns, ids, phases))
        return row, column, at_ids, phase, joined, read, by_function

    def watched_from(self) -> list[tuple[int, int]]:
        """Return (position, number) of each watched state."""
        turns = [
            [(column, number) for column, number in turn.recording.watches if column < turn.end]
            for turn in self.turns()
        ]
        number_at: dict[int, int] = {}
        for column, number in (one for watches in reversed(turns) for one in watches):
            if number != next(reversed(number_at.values()), None):
                number_at[max(0, column - self.offset)] = number
        return list(number_at.items())

    def mismatch(self, sequences: Ints) -> str | None:
        """Return why `sequences [B, L]` do not match, or None."""
        n_rows, length = sequences.shape
        if self.ids is not None and self.ids.shape[1] != length:
            return (
                f"the output has {length} columns, the watched generate() returned {self.ids.shape[1]}: give its output"
                " whole"
            )
        if self.beams is not None:
            return self._beam_mismatch(self.beams, sequences)
        if n_rows != self.call.n_rows:
            return (
                f"the output has {n_rows} rows, {self.call.n_rows} were watched: give the output of the watched"
                " generate()"
            )
        if self.call.frontier < length + self.offset - 1:
            return (
                f"the output has {length} columns, the watched forwards end at column"
                f" {self.call.frontier - self.offset}: either this is not the output of the watched generate(), or the"
                " model ran forwards past our hooks (a compiled graph?)"
            )
        if self.call.prompt_columns is None and self.call.frontier > length + self.offset:
            return (
                f"the ids have {length} columns, {self.call.frontier - self.offset} were watched: give the document's"
                " ids whole"
            )
        row, column, ids, *_ = self._joined(length)
        inside = column >= self.offset
        row, column, ids = row[inside], column[inside] - self.offset, ids[inside]
        wrong = np.flatnonzero((sequences[row, column] != ids) & (ids != NO_ID))
        if len(wrong):
            i = wrong[0]
            return (
                f"row {row[i]}, position {column[i]}: the output has token {sequences[row[i], column[i]]}, the forward"
                f" had {ids[i]}: this is not the output of the watched generate(), or it was edited"
            )
        return self._edited(sequences)

    def _edited(self, sequences: Ints) -> str | None:
        """Return a difference that no forward showed: last tokens, padding."""
        if self.ids is None:
            return None
        if self.ids.shape != sequences.shape:
            return (
                f"the output has {len(sequences)} rows, the watched generate() returned {len(self.ids)}: give its"
                " output whole"
            )
        for row, column in np.argwhere(self.ids != sequences)[:1].tolist():
            return (
                f"row {row}, position {column}: the output has token {sequences[row, column]}, the watched generate()"
                f" returned {self.ids[row, column]}: this is not its output, or it was edited"
            )
        return None

    def _beam_mismatch(self, beams: Beams, sequences: Ints) -> str | None:
        n_rows, n_prompts = len(sequences), self.call.n_rows // beams.n_beams
        if n_rows % n_prompts or n_rows > self.call.n_rows:
            return (
                f"the output has {n_rows} rows, {n_prompts} prompts were watched with {beams.n_beams} beams: give the"
                " output of that generate()"
            )
        each = n_rows // n_prompts
        row, column, ids, _phase, *_ = self._joined(sequences.shape[1])
        for i in np.flatnonzero((column < self.offset + beams.begin) & (column >= self.offset)).tolist():
            r = int(row[i]) // beams.n_beams * each
            if sequences[r, column[i] - self.offset] != ids[i]:
                return f"row {r}, position {column[i] - self.offset}: the output has another token than the forward had"
        for r in range(n_rows):
            entries, n = beams.follow(r // each, sequences[r, beams.begin :])
            if len(entries) < n - 1:
                return (
                    f"row {r}, position {beams.begin + len(entries)}: no beam had this sequence: this is not the output"
                    " of the watched generate(), or it was edited"
                )
        return self._edited(sequences)
