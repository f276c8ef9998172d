"""Every architecture of the installed transformers in every mode: exact, refused by name, or impossible without us too.

    python scripts/benchmarks/architectures.py  # all, to docs/benchmarks/architectures.json
    python scripts/benchmarks/architectures.py llama mamba2 --mode beams        # some of them, printed
    python scripts/benchmarks/architectures.py llama --out FILE                 # some of them, renewed in FILE

Each host is tiny and random, of the architecture's own code, and runs in a process of its own with a time limit.
What can come out:

- exact: every score of every token is that of one plain forward over the row's tokens alone, without cache or padding;
- as run: the bare host differs from such a forward by itself, but every score is that of a state it had;
- refused: by a typed error; where that says that the host's own answer is wrong, the bare host's must be;
- host fails: the bare host raises, too;
- wrong: anything else. Nothing may be.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig

import provenance
from architecture_corpus import corpus
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ProbemonError
from probemon.host.model import find_layers, is_encoder_decoder, text_config
from probemon.host.trials import CACHES
from probemon.host.twin import VOCABULARY, shrunken, twin
from probemon.util.files import write_text_atomically

ROOT = Path(__file__).parents[2]
BAR = (
    1e-3  # of scores between 0 and 1, in fp32: rounding grows in random hosts, what is wrong is wrong by more than 1e-2
)
OWN_BAR = 1e-5  # the same states, scored in batches of another size
HOST_BAR = 1e-3  # of logits, relative to their largest: above it the bare host contradicts itself
WINDOW = 8  # of attention: crossed by every sequence here
LIMIT_SECONDS = 120
NEW = 6
PAD, EOS = 0, VOCABULARY  # no token ends a row
PROMPT = torch.tensor([[1, 44, 3, 17, 8, 44, 3]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])

# What the defaults lack, before they are made small: hosts whose default has one kind of layer only, or none at all.
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
    },
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
}
# What must be changed in the small configuration.
SMALL: dict[str, dict[str, Any]] = {
    "xlstm": {"chunk_size": 64},
    "dots3_note": {"head_dim": 12},
    "dots3_note_text": {"head_dim": 12},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
}


# -- hosts ---------------------------------------------------------------------------------------


def architectures() -> dict[str, str]:
    """Names of all architectures with a causal decoder, and whether they are "causal" or "seq2seq"."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as SEQ2SEQ

    return {**dict.fromkeys(SEQ2SEQ, "seq2seq"), **dict.fromkeys(CAUSAL, "causal")}


def build(name: str, kind: str) -> Any:
    """A tiny random host of architecture `name`."""
    mapping = (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if kind == "causal"
        else transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    default = transformers.CONFIG_MAPPING[name](**CHANGES.get(name, {}))
    config = shrunken(default, WINDOW, **SMALL.get(name, {}))
    made = mapping[type(config)]
    made = made[0] if isinstance(made, tuple) else made
    if made.config_class is not type(config) and made.config_class is type(config.get_text_config()):
        config = config.get_text_config()
    config.pad_token_id = PAD
    if kind == "causal":  # encoders and halves of encoder-decoders, too, as what they are listed for
        config.is_decoder, config.is_encoder_decoder = True, False
    model = twin(made, config)
    if hasattr(model, "generation_config"):  # what it says of ends, penalties and forced tokens is not tried here
        model.generation_config = GenerationConfig(pad_token_id=PAD, bos_token_id=1)
    return model


def make_pack(folder: Path, model: Any) -> ProbePack:
    """Eight random linear probes at the first and the last layer."""
    width, n_layers = int(text_config(model).hidden_size), len(find_layers(model)[1])
    sites = [f"resid_post.{i}" for i in sorted({0, n_layers - 1})]
    g = torch.Generator().manual_seed(0)
    return ProbePack.write(
        folder,
        name="random",
        concepts=[{"id": f"c{i}", "name": f"concept {i}", "parents": []} for i in range(8)],
        weights={"w1": torch.randn(8, 1, width, generator=g) / width**0.5, "b1": torch.randn(8, 1, generator=g) / 4},
        score_rule="independent",
        inputs=[{"site": site, "norm": "rmsnorm"} for site in sites],
        input_index=torch.arange(8) % len(sites),
        host={"model_id": "tiny random host", "hidden_size": width, "n_layers": n_layers, "fingerprint": ""},
        licence="CC0-1.0",
        card="Random probes.\n",
        alert_threshold=torch.full((8,), 0.5),
        golden_hidden=torch.randn(2, len(sites), width, generator=g),
        overwrite=True,
    )


class Oracle:
    """One plain forward over a row's tokens alone: scores of a manager, and logits."""

    def __init__(self, model: Any, manager: DynamicProbeManager) -> None:
        self.model, self.manager = model, manager

    def forward(self, ids: list[int], encoder: list[int] | None) -> tuple[Tensor, Tensor]:
        """Scores `[T, P]` and logits `[T, V]`."""
        _, layers = find_layers(self.model)
        seen: dict[str, Tensor] = {}
        handles = []
        for site in self.manager.pack.sites:
            layer = layers[int(site.split(".")[1])]
            handles.append(layer.register_forward_hook(lambda m, a, out, site=site: seen.update({site: _first(out)})))
        try:
            with torch.no_grad():
                given = (
                    {"input_ids": torch.tensor([encoder]), "decoder_input_ids": torch.tensor([ids])}
                    if encoder is not None
                    else {"input_ids": torch.tensor([ids])}
                )
                logits = self.model(**given, use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        scores = self.manager.score_all({site: hidden[0] for site, hidden in seen.items()})
        return torch.as_tensor(scores), logits


# -- modes ---------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"batch": True, **GREEDY},
    "sampled": {"batch": True, "do_sample": True, "temperature": 1.5},
    "beams": {"batch": True, "num_beams": 3, **GREEDY},
    "no cache": {"batch": True, "use_cache": False, **GREEDY},
    "second turn": {"turns": True, **GREEDY},
    "gap": {"batch": True, "gap": True, **GREEDY},
    "second turn, gap": {"turns": True, "gap": True, **GREEDY},
    "chunked": {"prefill_chunk_size": 3, **GREEDY},
    "prompt lookup": {"prompt_lookup_num_tokens": 3, **GREEDY},
    "static cache": {"cache_implementation": "static", **GREEDY},
    "plain": {"plain": [7], "use_cache": False},
    "plain, token by token": {"plain": [4, 1, 1, 1]},
    "plain, in pieces": {"plain": [3, 2, 2]},
    "plain, gap": {"plain": [17], "gap": True, "use_cache": False},
    "corpus": {},
}
GAP = range(3, 6)  # masked columns between a row's tokens
Line = tuple[int, list[int], "list[int] | None"]  # row, columns that were run, what the encoder reads


class Host:
    """One host in every mode."""

    def __init__(self, name: str, kind: str, folder: Path) -> None:
        self.model = build(name, kind)
        self.two = is_encoder_decoder(self.model)
        self.manager = DynamicProbeManager(
            make_pack(folder / "pack", self.model), keep_top_k=0, report_top_k=8, impl="cpu"
        )  # numba would compile in every process
        self.oracle = Oracle(self.model, self.manager)
        self.name, self.kind = name, kind
        self.masked_later = range(0)  # columns that one turn ran and the next one masks

    def try_mode(self, mode: str) -> dict[str, Any]:
        """Whether a mode is exact, and by how much not; `host`: how far the bare host is from its own plain forward."""
        if mode == "corpus":
            return self.try_corpus()
        entry: dict[str, Any] = {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out, lines, logits = self.run(mode)
                entry["host"] = self.host_deviation(out, lines, logits)
        except Exception as error:  # of every kind: it is the host's own
            entry["fails"] = f"{type(error).__name__}: {_line(error)}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = self.manager.attach(self.model)
                with run, self.own_states() as states:
                    out, lines, _ = self.run(mode)
            return {"outcome": "exact", **self.compare(run, out, lines, states, entry.get("host")), **entry}
        except ProbemonError as error:
            told_wrong = "whose own answer is wrong" in str(error) and "fails" not in entry
            in_vain = told_wrong and self.is_right(mode, entry.get("host") or 0.0)
            return {
                "outcome": "wrong" if in_vain else "refused",
                "reason": ("in vain: " if in_vain else "") + f"{type(error).__name__}: {_line(error)}",
                **entry,
            }
        except Exception as error:
            if entry.get("fails", "").startswith(type(error).__name__):
                return {"outcome": "host fails", "reason": entry.pop("fails")}
            where = traceback.extract_tb(error.__traceback__)[-1]
            return {
                "outcome": "wrong",
                "reason": f"{type(error).__name__}: {_line(error)} ({Path(where.filename).name}:{where.lineno})",
                **entry,
            }

    def is_right(self, mode: str, deviation: float) -> bool:
        """Whether the bare host is right in a mode, of these tokens by `deviation` and of some others."""
        for shift in (7, 19, 31):
            if deviation > HOST_BAR:
                break
            deviation = max(deviation, self.host_deviation(*self.run(mode, shift)) or 0.0)
        return deviation <= HOST_BAR

    def try_corpus(self) -> dict[str, Any]:
        """Documents that share batches, each against its own forward."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                worst, unseen = corpus(self.model, self.manager, lambda ids: self.oracle.forward(ids, None)[0])
        except ProbemonError as error:
            return {"outcome": "refused", "reason": f"{type(error).__name__}: {_line(error)}"}
        except Exception as error:
            where = [Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)]
            hosts_own = any("transformers" in parts for parts in where[-3:])
            return {
                "outcome": "host fails" if hosts_own else "wrong",
                "reason": f"{type(error).__name__}: {_line(error)}",
            }
        if unseen or not worst <= BAR:
            return {
                "outcome": "wrong",
                "reason": f"{unseen} tokens unseen, scores {worst:.2g} away from each document's own forward",
            }
        return {"outcome": "exact", "deviation": _short(worst)}

    @contextmanager
    def own_states(self) -> Iterator[dict[str, list[Tensor]]]:
        """All states that the tapped layers give meanwhile, `[rows, tokens, D]` each, seen by hooks of our own."""
        states: dict[str, list[Tensor]] = {site: [] for site in self.manager.pack.sites}
        _, layers = find_layers(self.model)
        handles = [
            layers[int(site.split(".")[1])].register_forward_hook(
                lambda m, a, out, kept=kept: kept.append(_first(out).detach().clone())
            )
            for site, kept in states.items()
        ]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def compare(
        self, run: Any, out: Tensor, lines: list[Line], states: dict[str, list[Tensor]], host: float | None
    ) -> dict[str, Any]:
        """Every token of every row, none else, against the oracle, and against all states that the host had."""
        result, worst, own = run.result(out), 0.0, 0.0
        had = torch.as_tensor(
            self.manager.score_all(
                {site: torch.cat([one.flatten(0, 1) for one in kept]) for site, kept in states.items()}
            )
        )
        for row, columns, encoder in lines:
            expected, _ = self.oracle.forward(out[row, columns].tolist(), encoder)
            at = {
                int(result.position[i]): int(i)
                for i in (result.row == row).nonzero()[0]
                if not result.coverage.unseen[i]
            }
            of_column = dict(zip(columns, expected, strict=True))
            for column in self.masked_later:  # the turn before scored it, before anything hid it
                of_column[column] = self.oracle.forward(out[row, : column + 1].tolist(), encoder)[0][-1]
            if sorted(at) != sorted(of_column):
                return {
                    "outcome": "wrong",
                    "reason": f"row {row}: positions {sorted(at)}, expected {sorted(of_column)}",
                }
            for position, i in at.items():
                scores = torch.zeros(expected.shape[1])
                scores[torch.as_tensor(result.scores.active(i))] = torch.as_tensor(result.scores.active_scores(i))
                worst = max(worst, float((scores - of_column[position]).abs().max()))
                own = max(own, float((scores - had).abs().amax(1).min()))
        told: dict[str, Any] = {"deviation": _short(worst), "own": _short(own)}
        if not own <= OWN_BAR:
            told |= {"outcome": "wrong", "reason": "a score is that of no state the host had"}
        elif not worst <= BAR:
            as_run = host is not None and host > HOST_BAR
            told |= (
                {"outcome": "as run"}
                if as_run
                else {"outcome": "wrong", "reason": "scores differ from those of one plain forward, the host does not"}
            )
        return told

    def host_deviation(self, out: Tensor, lines: list[Line], logits: Any) -> float | None:
        """Of the bare host: logits of its steps, or scores of its beams, against one forward, of the largest."""
        worst = None
        for row, columns, encoder in lines:
            _, expected = self.oracle.forward(out[row, columns].tolist(), encoder)
            if isinstance(logits, dict):  # beams: mean log probability of what was generated
                own = [i for i, column in enumerate(columns) if column >= logits["begin"] - 1]
                sure = expected.log_softmax(-1)
                mean = sum(float(sure[i, int(out[row, columns[i] + 1])]) for i in own) / len(own)
                apart = abs(mean - float(logits["scores"][row])) / max(1.0, abs(mean))
            else:
                given = logits[row]  # {column: [V]}
                apart = max(
                    (
                        float((given[column] - expected[i]).abs().max() / expected.abs().max())
                        for i, column in enumerate(columns)
                        if column in given
                    ),
                    default=0.0,
                )
            worst = max(worst or 0.0, apart) if math.isfinite(apart) else math.inf
        return _short(worst) if worst is not None else None

    def run(self, mode: str, shift: int = 0) -> tuple[Tensor, list[Line], Any]:
        """`(out, lines, logits)` of one mode; `shift`: of other tokens."""
        options, self.masked_later = dict(MODES[mode]), range(0)
        if "plain" in options:
            return self.plain(options, shift)
        batch, turns, gap = (options.pop(name, False) for name in ("batch", "turns", "gap"))
        common = {
            "max_new_tokens": NEW,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "return_dict_in_generate": True,
            "output_logits": True,
            "output_scores": True,
        }
        ids = _shifted(BATCH if batch else PROMPT, shift)
        if gap and self.two:
            raise NotImplementedError("the mask is of what is encoded")
        if gap and not turns:
            ids = torch.cat([ids[:, : GAP.start], torch.full((len(ids), len(GAP)), PAD), ids[:, GAP.start :]], dim=1)
        if self.two:  # an encoder counts its positions from the left, padding included
            ids = torch.tensor([[*row[row != PAD], *row[row == PAD]] for row in ids])
            options["decoder_start_token_id"] = 1
        given: dict[str, Any] = {"input_ids": ids}
        if batch:
            given["attention_mask"] = (ids != PAD).long()
        torch.manual_seed(6)
        if turns:
            first = self.model.generate(ids, **common, **options)
            held = {name: getattr(first, name) for name in CACHES if getattr(first, name, None) is not None}
            if not held:
                raise NotImplementedError("generate() returns no cache to go on with")
            own = [name for name in CACHES if name in inspect.signature(self.model.forward).parameters]
            held = {
                own[0] if len(own) == 1 else name: cache for name, cache in held.items()
            }  # what some call otherwise in their output
            given = {"input_ids": torch.cat([first.sequences, torch.tensor([[30, 31, 32]])], dim=1), **held}
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            masked = range(first.sequences.shape[1] - 3, first.sequences.shape[1] - 1) if gap else range(0)
            given["attention_mask"][:, list(masked)] = 0  # as of a row that ended early in a batch
            self.masked_later = masked
        made = self.model.generate(**given, **common, **options)
        out = made.sequences
        lines: list[Line] = []
        for row in range(len(out)):
            encoder, width = None, out.shape[1] - 1
            mask = given.get("attention_mask", torch.ones_like(ids))[min(row, len(ids) - 1)].tolist()
            columns = [column for column in range(width) if column >= len(mask) or mask[column]]
            if self.two:
                encoder = [int(token) for token in given["input_ids"][row] if token != PAD]
                columns = list(range(width))
            lines.append((row, columns, encoder))
        width = out.shape[1] - NEW
        if "num_beams" in options:
            return out, lines, {"scores": made.sequences_scores, "begin": width}
        logits = (
            [{width - 1 + i: step[row].float() for i, step in enumerate(made.logits)} for row in range(len(out))]
            if made.logits is not None
            else [{} for _ in lines]
        )
        return out, lines, logits

    def plain(self, options: dict[str, Any], shift: int) -> tuple[Tensor, list[Line], Any]:
        """Forwards without `generate()`, in pieces, each going on with the cache that the one before gave."""
        held: dict[str, Any] = {}
        logits: dict[int, Tensor] = {}
        encoder, at, cached = [1, 5, 9, 13] if self.two else None, 0, options.get("use_cache", True)
        prompt, mask = _shifted(PROMPT, shift), {}
        if "gap" in options:
            prompt = torch.cat([prompt, torch.full((1, len(GAP)), PAD), prompt], dim=1)
            mask = {"attention_mask": (prompt != PAD).long()}
            if not self.two:
                mask["position_ids"] = (mask["attention_mask"].cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            for width in options["plain"]:
                piece = prompt[:, at : at + width]
                given = (
                    {"input_ids": torch.tensor([encoder]), "decoder_input_ids": piece}
                    if self.two
                    else {"input_ids": piece}
                )
                made = self.model(**given, **mask, **held, use_cache=cached)
                held = {name: getattr(made, name) for name in CACHES if getattr(made, name, None) is not None}
                if not held and at + width < prompt.shape[1]:
                    raise NotImplementedError("a plain forward gives no cache to go on with")
                logits |= {at + j: made.logits[0, made.logits.shape[1] - width + j] for j in range(width)}
                at += width
        return prompt, [(0, [i for i, token in enumerate(prompt[0].tolist()) if token != PAD], encoder)], [logits]


def _shifted(ids: Tensor, shift: int) -> Tensor:
    """Other tokens, and the same padding."""
    return torch.where(ids == PAD, PAD, (ids - 1 + shift) % (VOCABULARY - 1) + 1)


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, (tuple, list)) else out


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


# -- the sweep -----------------------------------------------------------------------------------


def apart(work: Callable[[], Any], limit_seconds: int = LIMIT_SECONDS) -> Any:
    """What `work` returns in a process of its own that has all imports already; `{"error": ...}` where it does not."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_seconds)
        try:
            answer = work()
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {_line(error)}"}
        with os.fdopen(write, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return (
        json.loads(text)
        if text
        else {
            "error": (
                f"nothing after {limit_seconds} seconds"
                if os.WTERMSIG(status) == signal.SIGALRM
                else f"signal {os.WTERMSIG(status)}"
            )
        }
    )


def sweep(name: str, kind: str, modes: list[str]) -> dict[str, Any]:
    """One architecture in these modes, here; `{"not built": why}` where there is no such host."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            host = Host(name, kind, Path(folder))
            with host.manager.attach(host.model):
                pass
            host.oracle.forward([1, 5, 9], [1, 5] if host.two else None)
        except ProbemonError as error:
            return {"refused": f"{type(error).__name__}: {_line(error)}"}
        except Exception as error:
            return {"not built": f"{type(error).__name__}: {_line(error)}"}
        return {"class": type(host.model).__name__, "modes": {mode: host.try_mode(mode) for mode in modes}}


def main() -> int:
    """Sweeps, prints a line for each architecture, and writes the result file if all were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    known, modes = architectures(), given.mode or list(MODES)
    begin, found = time.perf_counter(), {}
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in sorted(given.names or known):
        started = time.perf_counter()
        found[name] = apart(lambda name=name: sweep(name, known[name], modes))
        row = found[name]
        row["commit"] = provenance.commit()
        told = {mode: _told(entry) for mode, entry in row["modes"].items()} if "modes" in row else row
        print(f"{name} ({time.perf_counter() - started:.1f} s): {json.dumps(told)}", flush=True)
    if not given.names or given.out:
        path = given.out or ROOT / "docs/benchmarks/architectures.json"
        before = json.loads(path.read_text()) if given.names and path.is_file() else {"architectures": {}}
        answer = {
            **provenance.about(),
            "transformers": transformers.__version__,
            "bar": BAR,
            "seconds": before.get("seconds") or round(time.perf_counter() - begin),
            "modes": modes,
            "architectures": dict(sorted({**before["architectures"], **found}.items())),
        }
        write_text_atomically(path, json.dumps(answer, indent=1) + "\n")
    return int(any(entry["outcome"] == "wrong" for row in found.values() for entry in row.get("modes", {}).values()))


def _told(entry: dict[str, Any]) -> str:
    told = entry["outcome"] if "reason" not in entry else f"{entry['outcome']}: {entry.get('reason', '')}"
    return f"{told} [{entry.get('deviation')}, host {entry.get('host', entry.get('fails'))}]"


if __name__ == "__main__":
    sys.exit(main())
