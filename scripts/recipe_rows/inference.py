"""Recipes of inference: attention, caches, batches, drafts, compiled code, against one plain forward or a plain run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from probemon.adapters.ltm import memory_of
from probemon.errors import UnsupportedDecoding
from probemon.host.model import find_layers
from probemon.host.recurrent.scan import scan_chunked, scan_loop, scan_parallel
from recipe_rows.hosts import (
    GREEDY,
    IDS,
    MASK,
    PADDED,
    PADDING,
    VOCABULARY,
    Watch,
    cache_of,
    largest,
    make,
    plain_states,
    states_in,
)
from recipe_rows.rows import Found, Refused, recipe, refusal

BOTH = ("ltm", "mamba2", "falcon_h1")
SCANNED = (24, 10, 1, 7)  # tokens at a time: whole chunks of the scans, and parts of one


def greedy(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The tokens that generate() returns, and their logits [B, new, V]."""
    out = model.generate(ids, return_dict_in_generate=True, output_logits=True, **{**GREEDY, **options})
    return out.sequences, torch.stack(out.logits, dim=1)


def forwards(model: Any, out: Tensor, first: Any, n_new: int) -> Tensor:
    """The logits [B, new, V] by which the new tokens should have been chosen, by one forward of each row alone."""
    rows = []
    with torch.no_grad():
        for row, line in enumerate(out):
            logits = model(line[None, first[row] : -1], use_cache=False).logits[0]
            rows.append(logits[-n_new:])
    return torch.stack(rows)


@recipe(
    "SDPA", "torch.nn.functional.scaled_dot_product_attention", "logits are those of eager attention",
    on=("ltm", "falcon_h1"), bound=1e-5,
    trap="is_causal=True with one query and a long cache: it attends to the first key alone", trap_least=0.1,
)  # fmt: skip
def sdpa(kind: str) -> Found:
    eager = make(kind, attn_implementation="eager")
    fast = make(kind, attn_implementation="sdpa")
    with Watch(fast) as watch:
        out, logits = greedy(fast, PADDED, attention_mask=MASK)
    same, expected = greedy(eager, PADDED, attention_mask=MASK)
    query, keys, values = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 9, 10))
    values = values[:, :, :9]
    right = functional.scaled_dot_product_attention(query, keys, values)
    wrong = functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    of_first = largest(wrong, values[:, :, :1])
    trap = largest(wrong, right) if of_first < 1e-6 else 0.0
    return Found(
        largest(logits, expected) if torch.equal(out, same) else float("inf"), watch.distance(out, PADDING), trap
    )


def generated(model: Any, ids: Tensor, first: Any = None, **options: Any) -> Found:
    """What generate() does with a watched host, against one forward of each row alone; `first` as in `distance`."""
    with Watch(model) as watch:
        out, logits = greedy(model, ids, **options)
    expected = forwards(model, out, [0] * len(ids) if first is None else first, logits.shape[1])
    return Found(largest(logits, expected), watch.distance(out, first))


@recipe("layers that nothing reads", "torch", "states below removed layers are those of the whole host", on=BOTH)
def unread_layers(kind: str) -> Found:
    states, lengths = [], []
    for n_layers in (1, 2):
        model = make(kind)
        decoder, layers = find_layers(model)
        if n_layers == 1:
            decoder.layers = layers[:1]
        kept: list[Tensor] = []
        layers[0].register_forward_hook(
            lambda module, args, out, kept=kept: kept.append(out[0] if isinstance(out, tuple) else out)
        )
        with torch.no_grad():
            decoder(IDS, use_cache=False)
        states.append(kept)
        lengths.append(sum(parameter.numel() for parameter in decoder.layers.parameters()))
    return Found(largest(*states) if lengths[0] < lengths[1] else float("inf"))


@recipe("cache", "transformers", "logits with a cache are those of one forward of the text", on=BOTH, bound=1e-5)
def cached(kind: str) -> Found:
    return generated(make(kind), IDS[:, :9])


@recipe("cache, bytes", "transformers", "bytes kept for a row, less those of the formula", on=BOTH)
def cache_bytes(kind: str) -> Found:
    model = make(kind)
    off: list[int] = []
    seen = 0.0
    for length in (7, 24):
        with torch.no_grad(), Watch(model) as watch:
            cache = cache_of(model(IDS[:, :length], use_cache=True))
        seen = max(seen, watch.distance(IDS[:, :length], last=0))
        rows = len(IDS)
        if kind == "ltm":
            shape = model.config.memory_shape()
            slots = [4 * rows * (2 * shape.slots * shape.memory_dim + shape.segment * shape.hidden_size)] * 2
            kept = [m.keys.nbytes + m.values.nbytes + m.features.nbytes for m in memory_of(cache).values()]
            off.append(abs(sum(kept) - sum(slots)))
            continue
        # 4 B D N of each layer's state; the attention of a hybrid grows: 2 H d T, for each of L layers
        off += [abs(state.nbytes - 4 * rows * 32 * 6) for state in states_in(cache)]
        if kind == "falcon_h1":
            grown = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            off.append(abs(grown - 4 * rows * 2 * 2 * 1 * 8 * length))
    return Found(float(max(off)), seen)


@recipe(
    "batched generation", "transformers",
    "logits of a batch that is padded on the left are those of each row alone", on=BOTH, bound=1e-5,
)  # fmt: skip
def batched(kind: str) -> Found:
    return generated(make(kind), PADDED, PADDING, attention_mask=MASK)


def _padded_after() -> tuple[Tensor, Tensor]:
    rows = [torch.cat([row[first:], row[:first]]) for row, first in zip(PADDED, PADDING, strict=True)]
    ids = torch.stack(rows)
    return ids, (ids != 0).long()


@recipe(
    "padding after the text", "transformers", "the last real token of each row, read where it stands",
    on=("mamba2", "falcon_h1"), bound=1e-5,
    trap="the guide's logits[:, -1], which are those of padding", trap_least=0.1,
)  # fmt: skip
def padded_after(kind: str) -> Found:
    model = make(kind)
    ids, mask = _padded_after()
    with torch.no_grad():
        with Watch(model) as watch:
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        alone = torch.stack(
            [model(row[None, first:]).logits[0, -1] for row, first in zip(PADDED, PADDING, strict=True)]
        )
    last = mask.sum(1) - 1
    seen = watch.distance(ids, last=PADDING)
    return Found(largest(logits[torch.arange(3), last], alone), seen, largest(logits[:, -1], alone))


@recipe("padding after the text, slots", "probemon", "it is refused", on=("ltm",), bound=None)
def padded_after_slots(kind: str) -> Refused:
    model = make(kind)
    ids, mask = _padded_after()
    with refusal(UnsupportedDecoding, "Pad on the left") as met:
        model.generate(ids, attention_mask=mask, **GREEDY)
    return met[0]


@recipe(
    "second turn", "transformers", "logits on the cache of the first turn are those of one forward",
    on=("ltm", "falcon_h1"), bound=1e-5,
)  # fmt: skip
def second_turn(kind: str) -> Found:
    model = make(kind)
    cache = DynamicCache(config=model.config)
    with Watch(model, states=kind == "ltm") as watch:  # states of a second turn have an unknown past
        first = model.generate(IDS[:1, :9], past_key_values=cache, **GREEDY)
        ids = torch.cat([first, IDS[1:2, :3]], dim=1)
        out, logits = greedy(model, ids, past_key_values=cache)
    return Found(largest(logits, forwards(model, out, [0], 8)), watch.distance(out))


@recipe("several tokens on a used cache", "transformers", "logits are those of one forward", on=BOTH, bound=1e-5)
def pieces(kind: str) -> Found:
    return _pieces(kind, [7, 6, 6, 5])


@recipe(
    "tokens one by one on a used cache", "transformers", "logits are those of one forward", on=("mamba",),
    bound=1e-5, trap="several at once: Mamba-1 begins again from a state of zeros", trap_least=1e-3,
)  # fmt: skip
def pieces_of_mamba(kind: str) -> Found:
    one_by_one = _pieces(kind, [7] + [1] * 17)
    return Found(one_by_one.value, one_by_one.watched, _pieces(kind, [7, 6, 6, 5], watched=False).value)


def _pieces(kind: str, sizes: list[int], *, watched: bool = True, followed: bool = True) -> Found:
    """Forwards of pieces on one cache; `followed`: as a loop by hand, without which a recurrent state is refused."""
    model = make(kind)
    name = "cache_params" if kind.startswith("mamba") else "past_key_values"
    parts: list[Tensor] = []
    cache, done = None, 0
    watch = Watch(model) if watched else None
    loop = watch.run.generating(IDS.shape[1]) if watch is not None and followed and kind != "ltm" else nullcontext()
    with torch.no_grad():
        expected = model(IDS[:2], use_cache=False).logits
        with watch or nullcontext(), loop:
            for part in IDS[:2].split(sizes, dim=1):
                more: dict[str, Any] = {} if cache is None else {name: cache}
                if kind == "falcon_h1":
                    more["position_ids"] = torch.arange(done, done + part.shape[1])[None]
                out = model(part, use_cache=True, **more)
                cache, done = cache_of(out), done + part.shape[1]
                parts.append(out.logits)
    seen = None if watch is None else watch.distance(IDS[:2], last=0)
    return Found(largest(torch.cat(parts, dim=1), expected), seen)


@recipe(
    "several tokens on a used cache, watched", "probemon", "it is refused, and generate() is named",
    on=("mamba", "mamba2"), bound=None,
)  # fmt: skip
def pieces_refused(kind: str) -> Refused:
    with refusal(UnsupportedDecoding, "use generate()") as met:
        _pieces(kind, [7, 6, 6, 5], followed=False)
    return met[0]


@recipe("prompt in chunks", "transformers", "logits are those of one forward", on=("ltm", "falcon_h1"), bound=1e-5)
def chunked(kind: str) -> Found:
    return generated(make(kind), IDS[:, :9], prefill_chunk_size=4)


@recipe("speculative decoding", "transformers", "a draft model is refused", on=BOTH, bound=None)
def speculative(kind: str) -> Refused:
    return _refused_as_stateful(kind, assistant_model=make(kind, seed=1))


def _refused_as_stateful(kind: str, **drafts: Any) -> Refused:
    model = make(kind)
    with refusal(ValueError, "stateful") as met, Watch(model):
        model.generate(IDS[:1, :9], **drafts, **GREEDY)
    return met[0]


@recipe("prompt lookup", "transformers", "it is refused", on=BOTH, bound=None)
def lookup(kind: str) -> Refused:
    return _refused_as_stateful(kind, prompt_lookup_num_tokens=3)


@recipe("static cache", "transformers", "it is refused", on=("ltm",), bound=None)
def static(kind: str) -> Refused:
    with refusal(UnsupportedDecoding, "DynamicCache") as met:
        make(kind).generate(IDS[:1, :9], cache_implementation="static", **GREEDY)
    return met[0]


def gathered(waiting: queue.Queue[Any], most: int, seconds: float) -> list[Any]:
    """Requests of the next batch: the first is waited for, others at most so long in all. None ends them."""
    texts, until = [waiting.get()], time.monotonic() + seconds
    while len(texts) < most and texts[-1] is not None:
        try:
            texts.append(waiting.get(timeout=max(0.0, until - time.monotonic())))
        except queue.Empty:
            break
    return texts


@recipe(
    "requests in batches", "queue.Queue and transformers",
    "logits of requests from a queue, in batches that leave when full or after 50 ms, are those of each alone",
    on=("ltm", "mamba2"), bound=1e-5,
)  # fmt: skip
def requests(kind: str) -> Found:
    model = make(kind)
    waiting: queue.Queue[Any] = queue.Queue()
    coming = [row[first:] for row, first in zip(PADDED, PADDING, strict=True)]
    for text in coming[:2]:
        waiting.put(text)
    batches = [gathered(waiting, 3, 0.05)]  # the third is late
    for later in (*coming[2:], *coming, None):
        waiting.put(later)
    batches += [gathered(waiting, 3, 0.05), gathered(waiting, 3, 0.05)]
    if [len(texts) for texts in batches] != [2, 3, 2] or batches[-1].pop() is not None:
        return Found(float("inf"))
    worst, seen = 0.0, 0.0
    for texts in batches:
        width = max(len(text) for text in texts)
        before = [width - len(text) for text in texts]
        ids = torch.stack([functional.pad(text, (n, 0)) for text, n in zip(texts, before, strict=True)])
        found = generated(model, ids, before, attention_mask=(ids != 0).long())
        worst, seen = max(worst, found.value), max(seen, found.watched or 0.0)
    return Found(worst, seen)


@recipe("streaming", "transformers.generation.BaseStreamer", "tokens streamed, that are not those returned", on=BOTH)
def streaming(kind: str) -> Found:
    from transformers.generation import BaseStreamer

    class Queued(BaseStreamer):
        def __init__(self) -> None:
            self.queue: queue.Queue[Any] = queue.Queue()

        def put(self, value: Tensor) -> None:
            self.queue.put(value.flatten().tolist())

        def end(self) -> None:
            self.queue.put(None)

    model, streamer, outs = make(kind), Queued(), []
    with Watch(model) as watch:
        thread = threading.Thread(target=lambda: outs.append(model.generate(IDS[:1, :9], streamer=streamer, **GREEDY)))
        thread.start()
        streamed = [token for part in iter(streamer.queue.get, None) for token in part]
        thread.join()
    wrong = sum(a != b for a, b in zip(streamed, outs[0][0].tolist(), strict=True))
    return Found(float(wrong), watch.distance(outs[0]))


@recipe(
    "scans", "torch", "states by a loop, in chunks and in parallel are those of the host's cache",
    on=("mamba2",), bound=1e-5,
    trap="a chunk that divides by products of decays: not finite, of so many of 64 tokens", trap_least=1.0,
)  # fmt: skip
def scans(kind: str) -> Found:
    model = make(kind)
    inputs: list[Any] = []
    with Watch(model) as watch, torch.no_grad():
        stack: Any = watch.states_recorder.stacks[0]
        updates = stack.updates

        def kept(*arguments: Any) -> Any:
            inputs.append(updates(*arguments))
            return inputs[-1]

        stack.updates = kept
        for n in SCANNED:
            model(IDS[:1, :n], use_cache=True)
    worst = 0.0
    for n, added_by in zip(SCANNED, inputs, strict=True):
        _, cache = plain_states(model, IDS[0, :n].tolist(), [])
        log, added = added_by.log_decay.transpose(0, 1), added_by.added.transpose(0, 1)
        expected = torch.stack([state[0] for state in states_in(cache)])
        for states in (scan_loop(log, added), scan_chunked(log, added, chunk=5), scan_parallel(log, added)):
            worst = max(worst, largest(states[-1], expected))
    decays = torch.full((64,), -1.6).cumsum(0).exp()
    trap = float((~(1 / decays).cumsum(0).isfinite()).sum())
    return Found(worst, watch.distance(IDS[:1, : SCANNED[-1]], last=0), trap)


@contextmanager
def _dynamo() -> Iterator[Callable[[], int]]:
    """A compiler that knows nothing from before, nor keeps anything; how many graphs it has made so far."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield lambda: int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()


@recipe(
    "torch.compile", "torch.compile", "logits of two lengths are those of the plain host; something was compiled",
    on=("ltm", "mamba2"), bound=1e-5,
)  # fmt: skip
def compiled(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    with _dynamo() as n_graphs, torch.no_grad():
        expected = [plain(IDS[:1, :n], use_cache=False).logits for n in (12, 8)]
        with Watch(model, states=False) as watch:
            fast = torch.compile(model, backend="eager", dynamic=True)
            found = [fast(IDS[:1, :n], use_cache=False).logits for n in (12, 8)]
        value = largest(found, expected) if n_graphs() else float("inf")
    return Found(value, max(watch.distance(IDS[:1, :n], last=0) for n in (12, 8)))


@recipe(
    "torch.compile, whole host", "torch.compile (inductor)",
    "logits of generate() on compiled code are those of one forward of the plain host; something was compiled",
    on=("mamba2",), bound=1e-5,
)  # fmt: skip
def compiled_whole(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    model.forward = torch.compile(model.forward)
    with _dynamo() as n_graphs, Watch(model, states=False) as watch:
        out, logits = greedy(model, IDS[:1, :9], max_new_tokens=4)
        value = largest(logits, forwards(plain, out, [0], 4)) if n_graphs() else float("inf")
        return Found(value, watch.distance(out, plain=plain))


@recipe(
    "fusion", "torch.compile (inductor)", "logits with fused feed-forwards are those of the plain host",
    on=("ltm", "falcon_h1"), bound=1e-5,
)  # fmt: skip
def fused(kind: str) -> Found:
    model, plain = make(kind), make(kind)
    for layer in model.model.layers:
        (layer.mlp if kind == "ltm" else layer.feed_forward).compile()
    with _dynamo() as n_graphs:
        with torch.no_grad(), Watch(model) as watch:
            logits = model(IDS).logits
        value = largest(logits, plain(IDS).logits) if n_graphs() else float("inf")
        return Found(value, watch.distance(IDS, plain=plain, last=0))


@recipe("continuous batching", "transformers", "generate_batch is refused", on=BOTH, bound=None)
def continuous(kind: str) -> Refused:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    model = make(kind)
    # The second is of transformers, which has no pages for such a layer.
    error, words = (UnsupportedDecoding, "one memory") if kind == "ltm" else (ValueError, "layer type")
    with refusal(error, words) as met, Watch(model, states=False):
        model.generate_batch(
            [[5, 9, 12], [7, 3]],
            progress_bar=False,
            generation_config=GenerationConfig(**{**GREEDY, "eos_token_id": VOCABULARY - 1}),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=32),
        )
    return met[0]
