"""Break attribution on purpose, one line at a time, and show that the tests notice.

    python scripts/benchmarks/mutate_alignment.py --out docs/benchmarks/mutations.json

Each mutation is applied to a copy of the package; the attribution tests must then fail. A mutation that survives
ends the script with status 1. The test that caught a mutation before is asked first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from probemon.util.files import write_text_atomically
from provenance import about

ROOT = Path(__file__).resolve().parents[2]
TESTS = [
    "tests/tracking/test_align.py",
    "tests/tracking/test_moved_rows.py",
    "tests/tracking/test_attach.py",
    "tests/monitor/test_run.py",
    "tests/monitor/test_actions.py",
    "tests/monitor/test_streams_beside.py",
    "tests/tracking/test_blindness.py",
    "tests/tracking/test_batching.py",
    "tests/host/test_hosts.py",
    "tests/host/test_abilities.py",
    "tests/tracking/test_states.py",
    "tests/tracking/test_by_hand.py",
    "tests/engine/test_extreme.py",
    "tests/tracking/test_silence.py",
    "tests/tracking/test_one_thread.py",
    "tests/lab/corpora/test_corpus_hosts.py",
]
# Which of them is asked first about a file: it most likely notices, and the others need not run.
FIRST = {
    "tracking/align.py": "align",
    "tracking/continuous_batching.py": "batching",
    "tracking/held_streamer.py": "actions",
    "host/abilities.py": "abilities",
    "host/changes.py": "silence",
    "host/trials.py": "abilities",
    "host/twin.py": "abilities",
    "host/internals.py": "batching",
    "manager.py": "streams_beside",
    "host/tap.py": "silence",
    "host/compiled.py": "attach",
    "tracking/generation.py": "actions",
    "lab/corpora/state_reader.py": "states",
    "tracking/hand_loop.py": "by_hand",
    "host/fingerprint.py": "corpus_hosts",
    "tracking/watched_threads.py": "one_thread",
    "tracking/cache_rows.py": "moved_rows",
    "tracking/generate_call.py": "abilities",
    "tracking/run_recordings.py": "silence",
    "engine/outcome.py": "extreme",
    "packs/opened.py": "extreme",
}
# Slow ones, run where those above notice nothing: compiled hosts, and steps on a device (in Triton's interpreter here).
SLOW = ["tests/tracking/test_attach.py", "tests/engine/test_device_step.py"]
QUICK, COMPILED = "not compil", "compil or test_device_step"
# (file, the line as it is, the line broken, what it breaks)
MUTATIONS = [
    (
        "tracking/align.py",
        "PlacedTokens(rows, at + first, offsets, forward.ids[rows, offsets], phase",
        "PlacedTokens(rows, at + first + 1, offsets, forward.ids[rows, offsets], phase",
        "every column one too far",
    ),
    (
        "tracking/align.py",
        "offsets = at + (first - forward.start)\n            begins",
        "offsets = at\n            begins",
        "offsets count from the new columns",
    ),
    (
        "tracking/align.py",
        "forward.mask[:, first:stop] != 0",
        "forward.mask[:, first:stop] == forward.mask[:, first:stop]",
        "padding is taken for tokens",
    ),
    (
        "tracking/align.py",
        "real = self.last_column >= column",
        "real = self.last_column > column",
        "a row's last token is lost",
    ),
    (
        "tracking/align.py",
        "real = self.last_column >= column",
        "real = self.last_column >= 0",
        "rows that ended are fed on",
    ),
    (
        "tracking/align.py",
        "        self.frontier = end\n",
        "        self.frontier = width\n",
        "the frontier forgets the cache",
    ),
    (
        "tracking/align.py",
        "max(self.frontier, min(end, self.prompt_columns))",
        "max(self.frontier, min(end, self.prompt_columns - 1))",
        "a prompt token is called generated",
    ),
    (
        "tracking/decoder_hooks.py",
        "pending.states[site] = hidden[rows, offsets]",
        "pending.states[site] = hidden[rows.flip(0), offsets]",
        "rows are exchanged",
    ),
    (
        "tracking/forward_call.py",
        "start = 0 if cache is None else n_cached(cache, given)",
        "start = 0",
        "the cache's length is ignored",
    ),
    (
        "tracking/run_recordings.py",
        "earlier = self.of_cache(generation.prompt.cache, column)",
        "earlier = None",
        "the first turn is forgotten",
    ),
    (
        "tracking/run_recordings.py",
        'earlier: dict[str, Any] = {} if known is None else {"earlier": known.recording, "earlier_rows": known.rows}',
        "earlier: dict[str, Any] = {}",
        "a document forgets what is in its cache",
    ),
    (
        "tracking/generation.py",
        "self.ids = np.concatenate([before, new_ids], axis=1)",
        "pass",
        "chunks of a prompt before the last are forgotten",
    ),
    (
        "tracking/generation.py",
        "self.begin = max(self.prompt.cached, self.begin)",
        "pass",
        "a chunked prompt begins before its cache",
    ),
    (
        "tracking/decoder_hooks.py",
        "if pending.placed.draft and pending.generation is not None:",
        "if False:",
        "drafts are reported at once",
    ),
    (
        "tracking/generation.py",
        "self.drafting += 1",
        "self.drafting += 0",
        "the model's own drafts are taken for its output",
    ),
    (
        "tracking/watcher.py",
        '"decoder_attention_mask" if is_encoder_decoder(model) else "attention_mask"',
        '"attention_mask"',
        "a decoder's padding is read from the encoder's mask",
    ),
    (
        "tracking/align.py",
        "self.frontier, self._n_sampled = column, max",
        "self._n_sampled = max",
        "columns that were not seen are waited for",
    ),
    (
        "tracking/align.py",
        "max(self._n_sampled, column - prompt)",
        "self._n_sampled",
        "tokens sampled past a gap are not counted",
    ),
    (
        "tracking/generation.py",
        "if not all_seen or first > max(self.scored_columns, self.prompt.columns):",
        "if False:",
        "a held streamer shows a token that was not seen",
    ),
    (
        "manager.py",
        '{"one_thread": True, **attach}',
        '{"one_thread": False, **attach}',
        "a stream gives another generation's tokens, and acts on it",
    ),
    (
        "tracking/generation.py",
        "                if column >= last:\n                    break\n",
        "",
        "rejected drafts are kept",
    ),
    (
        "tracking/generation.py",
        "call.take_back(last)",
        "pass",
        "the frontier stays beyond rejected drafts",
    ),
    (
        "tracking/generation.py",
        "call.ended(ends if pads else [])",
        "call.ended([])",
        "no row ever ends",
    ),
    (
        "tracking/generation.py",
        "pads = any(hasattr",
        "pads = True or any(hasattr",
        "rows end where generate does not pad them",
    ),
    (
        "tracking/generation.py",
        (
            "            self.rule_states[number] = {\n                row: before[origin] for row, origin in"
            " enumerate(self.origin.tolist()) if origin in before\n            }"
        ),
        "            self.rule_states[number] = dict(before)",
        "streaks and aggregates stay with the row of a beam",
    ),
    (
        "tracking/beams.py",
        "parent, origin[row] = running_parent",
        "parent, origin[row] = running_parent[0], row",
        "a beam's retained set stays with its row",
    ),
    ("tracking/beams.py", "b = row // self.n_beams", "b = row % self.n_beams", "beams belong to the wrong prompt"),
    (
        "tracking/beams.py",
        "self.finished.add((i // each,",
        "self.finished.add((i % each,",
        "hypotheses end in the wrong prompt",
    ),
    (
        "tracking/continuous_batching.py",
        "[placed.moved(begin) for placed in",
        "[placed.moved(0) for placed in",
        "every request has the states of the first",
    ),
    (
        "tracking/continuous_batching.py",
        "            earlier=forked,\n",
        "            earlier=None,\n",
        "a fork forgets its parent",
    ),
    (
        "host/internals.py",
        "state.generated_len() + 1",
        "state.generated_len() + 2",
        "a stop in continuous batching comes one token late",
    ),
    (
        "tracking/continuous_batching.py",
        "            SequenceColumns(len(prompt)),\n",
        "            SequenceColumns(len(prompt) + 1),\n",
        "a request's first token is called prompt",
    ),
    (
        "tracking/generate_call.py",
        "return int(ids.shape[1]) + int(start is None or not bool((ids[:, 0] == start).any()))",
        "return int(ids.shape[1])",
        "the start token that transformers adds is not counted",
    ),
    (
        "tracking/held_streamer.py",
        "generation.showable_columns():\n            self._streamer",
        "generation.scored_columns:\n            self._streamer",
        "a held streamer shows the token that met the rule",
    ),
    (
        "tracking/generation.py",
        "placed.columns.max()) + 1\n",
        "placed.columns.max()) + 2\n",
        "a held streamer shows a token before its score",
    ),
    (
        "monitor/token_scorer.py",
        "_Scored(scores, rows[0], retained)",
        "_Scored(scores, rows[0], np.zeros_like(retained))",
        "the prompt hands nothing to the generation",
    ),
    (
        "monitor/token_scorer.py",
        "begin + len(one.placed) - 1 - from_end",
        "begin + from_end",
        "another token's retained set begins the generation",
    ),
    (
        "monitor/token_scorer.py",
        "_Scored(scores, batches[0].placed.rows, retained)",
        "_Scored(scores, batches[0].placed.rows, np.zeros_like(retained))",
        "retained sets are not carried",
    ),
    ("host/compiled.py", "written[0].add_(1)", "pass", "what a graph wrote is not counted"),
    (
        "host/compiled.py",
        "self._room[site][:n_rows, :n_tokens].clone()))",
        "self._room[site].flip(0)[:n_rows, :n_tokens].clone()))",
        "rows of a compiled host are exchanged",
    ),
    ("host/compiled.py", "if shared:", "if False:", "threads read one another's buffers"),
    ("host/compiled.py", "            self._after(decoder, (), out)\n", "", "a compiled call is not closed"),
    (
        "tracking/decoder_hooks.py",
        "            self._take_states(site, hidden)\n",
        "            pass\n",
        "buffers are not read",
    ),
    (
        "tracking/decoder_hooks.py",
        "        self.wait_for_step()  # its retained sets are what this one begins with\n",
        "",
        "a step begins before the one under way has ended",
    ),
    (
        "monitor/followers.py",
        "placed.columns - recording.offset,",
        "placed.columns,",
        "sinks get columns of the cache for positions",
    ),
    (
        "tracking/align.py",
        "if not (before == now).all():",
        "if (before != now).all():",
        "a prompt that is run again under another mask keeps its scores",
    ),
    (
        "tracking/recording.py",
        "self._real(n_rows, length) | (index >= 0)",
        "self._real(n_rows, length)",
        "what a later turn masks is no token",
    ),
    (
        "tracking/recording.py",
        "self.switched = self.switched or (self.mark is not None and self.mark.switched())",
        "pass",
        "an adapter that is switched and switched back is not told",
    ),
    (
        "tracking/run_recordings.py",
        "same.keep_mark(self.marks.now())",
        "pass",
        "a document forgets that the host changed",
    ),
    (
        "tracking/recording.py",
        "turn = Turn(earlier, min(turn.end, recording.call.first_column), rows)",
        "turn = Turn(earlier, turn.end, rows)",
        "columns of an earlier turn are taken twice",
    ),
    (
        "tracking/recording.py",
        "real[:, :n_columns] = mask[:, self.offset : self.offset + n_columns] != 0",
        "pass",
        "padding appears in the result",
    ),
    (
        "tracking/recording.py",
        "return real & (np.arange(length) <= last[:, None])",
        "return real",
        "padding after the end appears in the result",
    ),
    (
        "tracking/recording.py",
        (
            "            index[r, beams.begin : beams.begin + len(entries)] = np.maximum(\n               "
            " np.asarray(entries, dtype=np.int64) - self.n_forgotten, -1\n            )"
        ),
        (
            "            index[r, beams.begin : beams.begin + len(entries)] = np.maximum(np.asarray(entries,"
            " dtype=np.int64), -1)"
        ),
        "beams point at scores that were forgotten",
    ),
    (
        "tracking/generate_call.py",
        '"beams": mode in _BEAMS,',
        '"beams": False,',
        "beams that do not take their state along are scored",
    ),
    (
        "tracking/generate_call.py",
        "any(_is_used(arguments.get(name)) for name in CACHES)",
        "False",
        "a second turn that starts from a wrong state is scored",
    ),
    ("tracking/generate_call.py", '"padded": padded,', '"padded": False,', "padding in a state is not asked about"),
    (
        "tracking/decoder_hooks.py",
        "        if generation is None or generation.by_hand:\n",
        "        if False:\n",
        "plain forwards that start from a wrong state are scored",
    ),
    (
        "tracking/decoder_hooks.py",
        "        self.abilities.check_streams(sites)\n",
        "",
        "streams that do not fit are attached to",
    ),
    (
        "tracking/watcher.py",
        'frozenset({"beside"} if self._running or self._n_beside else ())',
        "frozenset()",
        "two sequences in one module's state are scored",
    ),
    (
        "host/abilities.py",
        "            if trials.depends_on_the_cut:",
        "            if False:",
        "hosts that look at what comes after are refused",
    ),
    (
        "host/abilities.py",
        "distance = None if as_run is None else trials.distance(as_run)",
        "distance = None",
        "padding is not asked about where answers depend on the cut",
    ),
    ("tracking/generate_call.py", '"gap": gap and not used,', '"gap": False,', "masked columns are not asked about"),
    (
        "tracking/generate_call.py",
        '"turn, gap": gap and used,',
        '"turn, gap": False,',
        "what is masked of a used cache is not asked about",
    ),
    (
        "tracking/generate_call.py",
        "        decoder_way: bool(decoder_way),\n",
        "",
        "a decoder's padding is not asked about",
    ),
    (
        "tracking/decoder_hooks.py",
        'mask = "gapped" if',
        'mask = "masked" if',
        "masked columns of a plain forward are not asked about",
    ),
    ("host/twin.py", "        _fill_zeros(model)\n", "", "zeros hide what padding does"),
    (
        "lab/corpora/state_reader.py",
        "        abilities.check_again(self.window.n_tokens)\n",
        "",
        "corpora are read by a host that depends on what it read before",
    ),
    (
        "host/twin.py",
        'operator, kwargs["generator"] = variant, generator',
        "pass",
        "trying a host moves the random numbers",
    ),
    (
        "host/tap.py",
        "if width is not None and hidden.shape[2] != width:",
        "if False:",
        "states of another width are scored",
    ),
    (
        "host/tap.py",
        "if hidden.dim() != 3 or tuple(hidden.shape[:2]) != (n_rows, n_tokens):",
        "if hidden.dim() != 3:",
        "rows and tokens of another forward are scored",
    ),
    (
        "host/compiled.py",
        "self._room[site][:n_rows, :n_tokens].clone()",
        "self._room[site][:n_rows, :n_tokens]",
        "states of a compiled host are read where the next forward writes",
    ),
    (
        "tracking/decoder_hooks.py",
        "            self._begin_compiled(args, kwargs)\n",
        "            self._threads.in_other or self._begin_compiled(args, kwargs)\n",
        "of a compiled host, a thread that is not watched writes unseen",
    ),
    (
        "tracking/generation.py",
        "for generation in (self, *self.beside):",
        "for generation in (self,):",
        "a held streamer shows where another run stopped",
    ),
    (
        "tracking/watched_threads.py",
        'hasattr(self._here, "attached")',
        "True",
        "a run of one thread watches every thread",
    ),
    (
        "host/tap.py",
        "return standing.holds(layers) and all(",
        "return all(",
        "a layer or block that stands elsewhere by now is read as the one of its site",
    ),
    (
        "host/tap.py",
        "part._modules.get(name) is layers for part, name in self._holders",
        "True for _ in self._holders",
        "layers in whose place others were put are read",
    ),
    ("host/tap.py", "    if len(holders) > 1:", "    if False:", "layers that share a module are attached to"),
    (
        "tracking/decoder_hooks.py",
        "            if site in forward.seen_sites:",
        "            if False:",
        "a layer that runs twice shows its last states",
    ),
    (
        "tracking/decoder_hooks.py",
        "self.thread.ended = None\n        self.wait_for_step(report=False)\n",
        "self.thread.ended = None\n        self.wait_for_step()\n",
        "what was not the tokens' is reported all the same",
    ),
    (
        "tracking/decoder_hooks.py",
        "thread.inside, thread.forward, thread.early_states = False, None, {}",
        "thread.early_states = {}",
        "a forward that raised stays open",
    ),
    (
        "lab/corpora/state_reader.py",
        "            check_states(site, hidden, forward.shape, self.widths[site])\n",
        "",
        "a corpus is scored whatever its layers give",
    ),
    (
        "engine/outcome.py",
        "        without[rows[self.beyond(largest, n, rows, probes)]] = True\n",
        "",
        "a score that may be no number is one",
    ),
    (
        "engine/outcome.py",
        "unseen = unseen_inputs(largest, n)",
        "unseen = np.zeros(n, dtype=np.int64)",
        "states that are not finite are seen",
    ),
    (
        "packs/opened.py",
        "self.input_limit[probes] = limits",
        "self.input_limit[probes] = np.inf",
        "no weight is too large for any state",
    ),
    (
        "tracking/decoder_hooks.py",
        "if generation is None and self.plain.is_of_another_head(thread, forward, cache):",
        "if False:",
        "generate() of another head is taken for documents",
    ),
    (
        "tracking/plain_forwards.py",
        "if self._acts() and self._decodes(forward):",
        "if False:",
        "a loop by hand looks calm beside rules",
    ),
    (
        "tracking/plain_forwards.py",
        "            return forward.ids.shape[1] == 1\n",
        "            return False\n",
        "a loop by hand with a cache looks calm beside rules",
    ),
    (
        "tracking/decoder_hooks.py",
        "if self._acts() and FOLLOWING.begun[id(self.model)] > self._attached_at:",
        "if False:",
        "a run is blind where another follows",
    ),
    (
        "tracking/watcher.py",
        (
            "        self._hooks.thread.foreign = (\n            generation is None\n            and not"
            " FOLLOWING.models[id(self.model)]\n            and generate_around(self._hooks.decoder) is not None\n  "
            "      )"
        ),
        "        self._hooks.thread.foreign = generation is None and not FOLLOWING.models[id(self.model)]",
        "a loop that prepares its inputs is not seen",
    ),
    (
        "monitor/run.py",
        "if publisher.rules and self._watcher.n_documents:",
        "if False:",
        "rules that could never fire are not told",
    ),
    (
        "tracking/hand_loop.py",
        "self._ended = self._sampled(generation, ids, self._ended, True)",
        "self._ended = self._sampled(generation, ids, self._ended, False)",
        "rows that end in a loop by hand are fed on",
    ),
    (
        "tracking/hand_loop.py",
        "        generation.take_sampled(ids.detach().cpu().numpy())\n",
        "",
        "a loop by hand may run other tokens than it sampled",
    ),
    (
        "tracking/cache_rows.py",
        "if all(torch.equal(ours[row], theirs[other]) for ours, theirs in pairs)",
        "if True",
        "a cache is taken for a copy by its newest column alone",
    ),
    (
        "tracking/cache_rows.py",
        "if not all(alike(int(rows[row]), other) for other in equal if other != rows[row]):",
        "if False:",
        "rows that only their states tell apart are followed to any place",
    ),
    (
        "tracking/cache_rows.py",
        "if places != theirs or tuple(write_marks([part.tensor for part in other.parts])) != other.writes:",
        "if places != theirs:",
        "rows that were written over in place are taken as they were",
    ),
    (
        "tracking/cache_rows.py",
        "return same_parts and all(map(_is_same_memory, self.parts, other.parts))",
        "return same_parts",
        "rows of a cache that changed places are taken for those that stood there",
    ),
    (
        "tracking/cache_rows.py",
        "first = max(0, int(layer.get_seq_length()) - keys.shape[2])",
        "first = 0",
        "columns of a sliding window are taken for the first ones",
    ),
    (
        "tracking/run_recordings.py",
        "return Earlier(recording, None if same else origin)",
        "return Earlier(recording, None)",
        "rows that were repeated or selected are taken for those that stood in their places",
    ),
    (
        "tracking/run_recordings.py",
        "if earlier is None or earlier.recording is not recording or earlier.rows is not None:",
        "if False:",
        "rows that are moved within a loop by hand are taken as they are",
    ),
    (
        "tracking/run_recordings.py",
        "(filled is not None and filled.recording is recording and filled.is_untouched(cache))",
        "filled is not None",
        "a recurrent state that is touched within a loop by hand is taken as it is",
    ),
    (
        "tracking/run_recordings.py",
        "if hits and all(_alike(hits[0], one, rows.n_rows, n_columns) for one in hits[1:]) else None",
        "if hits else None",
        "a copy of a cache is taken for that of another one that is like it",
    ),
    (
        "tracking/generate_call.py",
        "        and isinstance(pad, int)\n        and pad not in _ends(config)\n",
        "        and isinstance(pad, int)\n",
        "a text that ends in padding which ends texts is refused",
    ),
    (
        "tracking/recording.py",
        "rows = turn.origin if rows is None else rows[turn.origin]",
        "rows = turn.origin if rows is None else rows",
        "rows that are moved twice are followed once",
    ),
    (
        "tracking/recording.py",
        "entries, later_rows = np.nonzero((rows[:, None] == self.origin) & (columns < self.end)[:, None])",
        "entries, later_rows = np.nonzero(rows[:, None] == self.origin)",
        "of a row that was moved, columns of an earlier turn are taken twice",
    ),
    (
        "ops/judges/escalations.py",
        "row if turn.origin is None else int(turn.origin[row])",
        "row",
        "a judge reads the text of the row that stood there before",
    ),
    (
        "tracking/run_recordings.py",
        "    if len(agreeing) == 1:\n",
        "    if agreeing:\n",
        "a copy of an output is of the first generation that has its ids",
    ),
    (
        "tracking/watcher.py",
        "generation.check_prompt(ids.shape[1] + recording.offset)",
        "pass",
        "a prompt that was changed on its way into generate() is believed",
    ),
    ("tracking/generate_call.py", "        if after:\n", "        if False:\n", "a prompt that ends in padding is run"),
    (
        "tracking/decoder_hooks.py",
        "elif custom is None and not thread.inside:",
        "elif False:",
        "layers that run past the decoder are not told",
    ),
    (
        "tracking/decoder_hooks.py",
        "if self.model is not self.decoder and self.abilities.drops_mask():",
        "if False:",
        "padding that a decoder is not told of is scored",
    ),
    (
        "tracking/recording.py",
        "turns = [turn.recording for turn in self.turns()]",
        "turns = [self]",
        "an earlier turn of other adapters is not told",
    ),
    (
        "monitor/run.py",
        "        publisher.warn_of_silence(self.model, self._watcher.called, self._threads)",
        "        pass",
        "a run that watched nothing looks calm",
    ),
    (
        "lab/corpora/state_reader.py",
        "self._runs = model if wrapped else find_layers(decoder)[0]",
        "self._runs = find_layers(decoder)[0]",
        "a corpus is read without what PEFT's wrapper sets up",
    ),
    (
        "lab/corpora/state_reader.py",
        (
            "        grouped = batches(\n            pieces, max_tokens=self.reading.batch_tokens,"
            " max_rows=self.reading.batch_rows, padded=self._padded\n        )"
        ),
        (
            "        grouped = batches(pieces, max_tokens=self.reading.batch_tokens, max_rows=self.reading.batch_rows,"
            " padded=True)"
        ),
        "padding gets into the documents of a corpus",
    ),
    (
        "lab/corpora/state_reader.py",
        "class _OwnForward(threading.local):",
        "class _OwnForward:",
        "a corpus is scored by the forwards of other threads",
    ),
    (
        "lab/corpora/state_reader.py",
        "after=self._looks_ahead",
        "after=False",
        "what a host looks ahead at is left out of a corpus",
    ),
    (
        "host/fingerprint.py",
        "if module not in inside or module in adapters:",
        "if False:",
        "an analysis is gone on with under another adapter",
    ),
    (
        "tracking/recording.py",
        "np.argwhere(self.ids != sequences)[:1]",
        "np.argwhere(self.ids != sequences)[:0]",
        "the last token of an output is not compared",
    ),
    (
        "tracking/recording.py",
        "(mask[:, first:end] != 0) & ~was_run[:, first:]",
        "(mask[:, first:end] != 0) & was_run[:, :0].any()",
        "a token where a row of the cache has padding is taken as it is",
    ),
    (
        "tracking/watched_threads.py",
        "return self.one_thread and not self.attached_here",
        "return False",
        "a run of one thread takes the forwards of others for its own",
    ),
    (
        "tracking/watched_threads.py",
        "return self.one_thread and not self.attached_here",
        "return self.one_thread",
        "a run of one thread does not see its own",
    ),
    (
        "host/changes.py",
        "if last is not None and last[1].writes == writes and last[1].settings is settings and not last[1].tuners:",
        "if last is not None and last[1].writes == writes and last[1].settings is settings:",
        "adapters that were switched are those of before",
    ),
    (
        "host/changes.py",
        "if last is not None and last[1].writes == writes and last[1].settings is settings and not last[1].tuners:",
        "if last is not None and last[1].settings is settings and not last[1].tuners:",
        "weights that were written to are those of before",
    ),
    (
        "host/changes.py",
        "if last is not None and last[1].writes == writes and last[1].settings is settings and not last[1].tuners:",
        "if last is not None and last[1].writes == writes and not last[1].tuners:",
        "settings of modules that changed are those of before",
    ),
    (
        "host/changes.py",
        "if last is not None and not last[0].same(roots):",
        "if last is not None and False:",
        "weights that others took the place of are those of before",
    ),
]


def main() -> int:
    """Run the unbroken tests, then each mutation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as room:
        copy = Path(room)
        for name in ("probemon", "tests", "probes", "scripts", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        known = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.is_file() else {}
        caught_before = {one["what"]: one["caught_by"] for one in known.get("mutations", [])}
        if failed(copy, TESTS, QUICK) or failed(copy, SLOW, COMPILED):
            print("the tests fail without any mutation", file=sys.stderr)
            return 2
        mutated = []
        for file, before, after, what in tqdm(MUTATIONS, disable=None):
            path = copy / "probemon" / file
            text = path.read_text()
            if text.count(before) != 1:
                print(f"{file}: {before!r} occurs {text.count(before)} times, expected once", file=sys.stderr)
                return 2
            path.write_text(text.replace(before, after))
            likely = caught_before.get(what, "").partition("[")[0]
            caught_by = failed(copy, [likely]) if re.fullmatch(r"tests/\S+::\w+", likely) else ""
            if "::" not in caught_by:  # a test that is not there any more fails as well
                caught_by = failed(copy, first(file), QUICK) or failed(copy, SLOW, COMPILED)
            mutated.append({"file": file, "what": what, "caught_by": caught_by})
            path.write_text(text)
    n_caught = sum(bool(one["caught_by"]) for one in mutated)
    report = {"n_mutations": len(mutated), "n_caught": n_caught, "mutations": mutated, **about()}
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["n_caught"] == report["n_mutations"] else 1


def first(file: str) -> list[str]:
    """The quick tests, the one that most likely notices a broken file before the others."""
    likely = f"test_{FIRST.get(file, 'align')}.py"
    return sorted(TESTS, key=lambda test: not test.endswith(likely))


def failed(copy: Path, tests: list[str], chosen: str = "") -> str:
    """The first test that fails in the copy, of those that pytest's -k chooses, or an empty string."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # What waits for ever is noticed as well: no test takes a minute on a busy machine.
    at_most = ["-o", "faulthandler_timeout=120", "-o", "faulthandler_exit_on_timeout=true"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-v",
        *at_most,
        "-p",
        "no:cacheprovider",
        *(("-k", chosen) if chosen else ()),
        *tests,
    ]
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=1200)
    except subprocess.TimeoutExpired:
        return "ran out of time"
    if done.returncode == 0:
        return ""
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    if lines:
        return lines[0].split(" ")[1]
    begun = [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith("tests/")]
    return f"{begun[-1]} (does not end)" if "Timeout (" in done.stderr and begun else "could not be imported"


if __name__ == "__main__":
    sys.exit(main())
