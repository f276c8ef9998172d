"""Small hosts for the recipes, tokens for them, and Watch: what the monitor sees of a run, held against plain forwards.

host = make("ltm")
with Watch(host) as watch:                      # probes at two layers; states or reads of memory beside them
    out = host.generate(...)
watch.distance(out, PADDED)                     # of the scores and states from those of a plain forward of each row
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from probemon import DynamicProbeManager, ProbePack
from probemon.adapters.ltm import LtmConfig, LtmForCausalLM
from probemon.adapters.routing import Routing
from probemon.adapters.routing.recurrent.recorder import StateRecorder
from probemon.host.model import find_layers

VOCABULARY, HIDDEN, N_PROBES, PAD = 61, 16, 12, 0
SSM = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_ssm": 32}
SIZES: dict[str, dict[str, Any]] = {
    "ltm": {"num_attention_heads": 2, "intermediate_size": 24, "sliding_window": 5, "segment_size": 6,
            "memory_slots": 7, "memory_dim": 8, "memory_layers": [0, 1]},
    "mamba": {"state_size": 5, "intermediate_size": 32, "time_step_rank": 3},
    "mamba2": {"state_size": 6, "num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4},
    "falcon_h1": {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                  "mamba_chunk_size": 4, **SSM},
}  # fmt: skip
RECURRENT = ("mamba", "mamba2", "falcon_h1")
IDS = torch.randint(1, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(1))
PADDING = (5, 0, 9)  # columns before each row of the padded batch
PADDED = torch.where(torch.arange(14) < torch.tensor(PADDING)[:, None], PAD, IDS[:3, :14])
MASK = (PADDED != PAD).long()
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": PAD, "eos_token_id": None}


def make(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random host, in evaluation; its weights are large enough that every layer matters."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2, "pad_token_id": PAD,
        "bos_token_id": 1, "eos_token_id": None, **SIZES[kind], **changes,
    }  # fmt: skip
    if kind == "ltm":
        model: Any = LtmForCausalLM(LtmConfig(**sizes))
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "A_log" not in name:
                    weight.normal_(0, 0.3)
    return model.eval()


def cache_of(output: Any) -> Any:
    """The cache that a forward or generate() returned, whatever its family calls it."""
    found = getattr(output, "past_key_values", None)
    return found if found is not None else getattr(output, "cache_params", None)


def states_in(cache: Any) -> list[Tensor]:
    """The state [B, ...] of every recurrent layer in a cache."""
    layers = [getattr(layer, "recurrent_states", None) for layer in cache.layers]
    return [states[0] for states in layers if states is not None]


def largest(left: Any, right: Any) -> float:
    """The largest difference of two tensors, or of two lists of them; infinite where their shapes differ."""
    if not isinstance(left, Tensor):
        pairs = list(zip(left, right, strict=True))
        return max((largest(a, b) for a, b in pairs), default=np.inf)
    if left.shape != right.shape:
        return float(np.inf)
    return float((left.detach().double() - right.detach().double()).abs().max())


class Watch:
    """Watches a host with random linear probes at its two layers, and its states (recurrent) or reads (memory).

    `training`: without the reads of a memory, which the monitor refuses there. `states`: False for the probes alone.
    """

    def __init__(self, model: Any, *, training: bool = False, states: bool = True) -> None:
        self.model, self._stack = model, ExitStack()
        kind = model.config.model_type
        self._tapped = [f"resid_post.{layer}" for layer in (0, model.config.num_hidden_layers - 1)]
        self._folder = Path(tempfile.mkdtemp())
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)  # distance() still reads the pack
        reads = kind == "probemon_ltm" and states and not training
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a pack without a fingerprint fits every random host
            self.manager = DynamicProbeManager(self._pack())
            follows = states and kind in RECURRENT
            routing = [Routing(states=follows)] if follows or reads else []
            self.run = self.manager.attach(model, followers=routing)
        self.states: dict[int, dict[str, Tensor]] = {}
        self.reads: dict[tuple[int, int, int], dict[str, Any]] | None = {} if reads else None
        self.recorder: StateRecorder | None = self.run.follower(Routing).recurrent if follows else None

    @property
    def states_recorder(self) -> StateRecorder:
        """What is recorded of a recurrent host."""
        assert self.recorder is not None
        return self.recorder

    def _pack(self) -> ProbePack:
        generator = torch.Generator().manual_seed(2)
        return ProbePack.write(
            self._folder / "pack",
            name="random",
            concepts=[{"id": f"c{i}", "name": f"random {i}", "parents": []} for i in range(N_PROBES)],
            weights={
                "w1": torch.randn(N_PROBES, 1, self.model.config.hidden_size, generator=generator) / 4,
                "b1": torch.randn(N_PROBES, 1, generator=generator) / 4,
            },
            score_rule="independent",
            host={"model_id": "random", "n_layers": self.model.config.num_hidden_layers},
            licence="CC0-1.0",
            inputs=[{"site": site, "norm": "rmsnorm"} for site in self._tapped],
            input_index=torch.arange(N_PROBES) % len(self._tapped),
            card="Random probes.\n",
        )

    def __enter__(self) -> Watch:
        self._stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        self._stack.enter_context(self.run)
        if self.reads is not None:
            self.run.follower(Routing).listen(self._read)
        if self.recorder is not None:
            self.recorder.listen(self._told)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _told(self, row: int, tokens: Any, told: dict[str, Any]) -> None:
        for names, of_stack in told.items():
            for name, state in zip(names.split(), of_stack.state, strict=True):
                self.states.setdefault(row, {})[name] = state.clone()

    def _read(self, tokens: Any, decisions: Any, record: Any) -> None:
        assert self.reads is not None
        for line in record.lines():
            self.reads[line["row"], line["pos_start"], int(line["layer"])] = line

    # -- against plain forwards ------------------------------------------------------------------

    def distance(
        self,
        out: Tensor,
        first: Any = None,
        *,
        plain: Any = None,
        last: int | Sequence[int] = 1,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> float:
        """How far the scores and states of `out [B, T]` are from those of one forward of each row alone.

        `first`: how many columns of padding stand before each row. `last`: how many tokens at the end the host never
        ran, or how many columns of padding stand after each row. `plain`: the host that makes the forwards, where it is
        not the one that was watched. `around`: what they run in. Infinite where a token is missing or is another one.
        """
        plain = self.model if plain is None else plain
        worst = 0.0
        result = self.run.result(out)
        for row, line in enumerate(out.tolist()):
            begin = 0 if first is None else first[row]
            ids = line[begin : len(line) - (last if isinstance(last, int) else last[row])]
            with around():
                hidden, cache = plain_states(plain, ids, self._tapped)
            expected = self.manager.score_all(hidden).numpy()
            mine = [i for i in np.flatnonzero(result.row == row).tolist() if not result.coverage.unseen[i]]
            if result.position[mine].tolist() != list(range(begin, begin + len(ids))):
                return float(np.inf)
            if result.token_id[mine].tolist() != ids:
                return float(np.inf)
            for i, scores in zip(mine, expected, strict=True):
                probes = result.scores.active(i)
                if len(probes) != N_PROBES:
                    return float(np.inf)
                worst = max(worst, float(np.abs(result.scores.active_scores(i) - scores[probes]).max()))
            if self.reads is not None:
                worst = max(worst, self._reads_distance(plain, row, begin, ids))
            if self.recorder is not None:
                told = self.states.get(row, {})
                states = states_in(cache)
                if len(told) != len(states):
                    return float(np.inf)
                worst = max(worst, largest(list(told.values()), [state[0] for state in states]))
        return worst

    @torch.no_grad()
    def _reads_distance(self, plain: Any, row: int, begin: int, ids: list[int]) -> float:
        """How far the p of the slots read most is from those of one forward of a row alone."""
        assert self.reads is not None
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            return lambda module, args, output: found.update({layer: output.reads[0]})

        handles = [memory.register_forward_hook(keep(layer)) for layer, memory in plain.memories.items()]
        was_training = plain.training
        plain.eval()(torch.tensor([ids]), use_cache=False)
        plain.train(was_training)
        for handle in handles:
            handle.remove()
        worst = 0.0
        for layer, p in found.items():
            for at in range(len(ids)):
                line = self.reads.get((row, begin + at, layer))
                if line is None:
                    return float(np.inf)
                n_slots = p.shape[1] - 1  # the null slot has the number after the last one
                for slot, weight in zip(line["top_idx"], line["top_w"], strict=True):
                    worst = max(worst, abs(weight - float(p[at, 0 if slot == n_slots else slot + 1])))
        return worst


@torch.no_grad()
def plain_states(model: Any, ids: list[int], sites: list[str]) -> tuple[dict[str, Tensor], Any]:
    """The hidden states {site: [T, D]} of one unpadded text by one plain forward, and the cache after it."""
    seen: dict[str, Tensor] = {}

    def keep(site: str) -> Any:
        return lambda module, args, out: seen.update({site: (out[0] if isinstance(out, tuple) else out)[0]})

    layers = find_layers(model)[1]
    handles = [layers[int(site.split(".")[1])].register_forward_hook(keep(site)) for site in sites]
    was_training = model.training
    try:
        cache = cache_of(model.eval()(torch.tensor([ids]), use_cache=True))
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return {site: states.float() for site, states in seen.items()}, cache
