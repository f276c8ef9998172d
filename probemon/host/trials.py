"""Trials: run a twin in one way, against a single forward.

with isolated():
    distance = try_way(twin, "beams")       # relative to the largest logit; raises if the twin cannot
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from probemon.errors import UnsupportedModel
from probemon.host.internals import CACHE_NAMES
from probemon.host.model import find_layers, is_encoder_decoder, site_module
from probemon.host.twin import VOCABULARY, own_randomness

CACHES = (*CACHE_NAMES, "state", "mems", "past_buckets_states")  # names in various models
PADDING_AFTER, MORE_AFTER, AGAIN = "padding after", "more after", "again"
PADDING_BEFORE, GAP_AS_RUN = "padding before", "gap, as run"
ROWS = ((1, 44, 3, 17, 8, 44, 3), (5, 9, 13, 7, 21, 22, 23))
NEW = 5
Kind = tuple[str, str, str]  # site kind, classes of layer and module
BLOCKS = ("attn_out", "mlp_out")


@dataclass(frozen=True)
class TriedWay:
    """A way of running a model, with parts of error messages."""

    name: str
    cannot: str
    remedy: str
    options: tuple[tuple[str, Any], ...] = ()


def _forward_ways() -> dict[str, TriedWay]:
    kinds = {
        "whole": ("a plain forward", "of one length, or row by row"),
        "forward": ("a plain forward on a used cache", "with use_cache=False and all tokens, or use generate()"),
        "pieces": ("a forward of several tokens on a used cache", "one by one, or all at once without a cache"),
    }
    masks = {
        "": ("", "", ""),
        ", masked": (" with an attention mask", "take a mask of all its columns", "Leave the mask out"),
        ", padded": (" with padding before its tokens", "leave padding out", ""),
        ", gapped": (" with masked columns between its tokens", "leave such columns out", ""),
    }
    ways = {}
    for kind, (name, instead) in kinds.items():
        for mask, (mask_name, cannot, mask_remedy) in masks.items():
            for without in ("", ", no positions"):
                if (mask, without) == ("", "") or (kind == "whole" and mask not in (", padded", ", gapped")):
                    continue
                remedies = [*(["Give position_ids"] if without else []), *([mask_remedy] if mask_remedy else [])]
                ways[f"{kind}{mask}{without}"] = TriedWay(
                    f"{name}{mask_name}{' without position_ids' if without else ''}",
                    "count the tokens before" if without and mask in ("", ", masked") else cannot,
                    ", or ".join([*remedies, f"{'pass' if remedies else 'Pass'} them {instead}"]),
                )
    return ways


WAYS = {
    "no cache": TriedWay("generate() without a cache", "answer as in one forward", "", (("use_cache", False),)),
    "steps": TriedWay("generate() with a cache", "go on from its own state", "use_cache=False"),
    "padded": TriedWay("a left-padded batch", "leave padding out", "Generate for rows of one length, or one by one"),
    "padded, no cache": TriedWay(
        "a left-padded batch",
        "leave padding out",
        "Generate for rows of one length, or one by one",
        (("use_cache", False),),
    ),
    "gap": TriedWay(
        "a batch with masked columns between a row's tokens",
        "leave such columns out",
        "Generate row by row, without them",
    ),
    "gap, no cache": TriedWay(
        "a batch with masked columns between a row's tokens",
        "leave such columns out",
        "Generate row by row, without them",
        (("use_cache", False),),
    ),
    "decoder padded": TriedWay(
        "a batch with padding among decoder_input_ids",
        "leave padding out",
        "Generate row by row, without it",
    ),
    "decoder gap": TriedWay(
        "a batch with masked columns between decoder_input_ids",
        "leave such columns out",
        "Generate row by row, without them",
    ),
    "turn, gap": TriedWay(
        "a used cache some of whose columns are masked now (a row of the batch that ended early)",
        "forget them",
        "Generate row by row, or start with an empty cache",
    ),
    "beams": TriedWay(
        "beam search with a cache",
        "reorder all of its state with its beams",
        "use_cache=False, or num_beams=1",
        (("num_beams", 3),),
    ),
    "turn": TriedWay("a used cache (a second turn)", "go on from it in generate()", "Start with an empty cache"),
    "static": TriedWay(
        "a static cache", "go on from it", "Leave cache_implementation out", (("cache_implementation", "static"),)
    ),
    "chunked": TriedWay(
        "a prompt in chunks (prefill_chunk_size)",
        "go on from its state with several tokens",
        "Leave prefill_chunk_size out",
        (("prefill_chunk_size", 3),),
    ),
    "speculative": TriedWay(
        "assisted generation",
        "take back what was drafted",
        "Leave the assistant out",
        (("prompt_lookup_num_tokens", 2),),
    ),
    "beside": TriedWay(
        "a generate() alongside another",
        "keep the states of two sequences apart: they are inside its modules",
        "Generate one after the other",
    ),
    "forward": TriedWay(
        "a plain forward on a used cache",
        "go on from its own state",
        "Give use_cache=False and all tokens, or use generate()",
    ),
    "pieces": TriedWay(
        "a forward of several tokens on a used cache",
        "go on from its state with several tokens",
        "Pass them one by one, or all at once without a cache",
    ),
    **_forward_ways(),
    "forwards beside": TriedWay(
        "a plain forward on a used cache",
        "keep the states of two sequences apart: they are inside its modules",
        "Give use_cache=False and all tokens, or use generate()",
    ),
}


@contextmanager
def isolated() -> Iterator[None]:
    """Isolate the twin from autocast, device and random state."""
    with (
        torch.inference_mode(False),
        own_randomness(0),
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _inputs(model: Any, ids: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Inputs for decoder rows `[B, T]`; an encoder gets `ROWS` from `first` on."""
    return (
        {"input_ids": torch.tensor(ROWS)[first : first + len(ids)], "decoder_input_ids": ids}
        if is_encoder_decoder(model)
        else {"input_ids": ids}
    )


def _logits(output: Any) -> Tensor:
    """Logits, or a bare decoder's hidden states."""
    logits = getattr(output, "logits", None)
    answer: Tensor = logits if logits is not None else output.last_hidden_state
    return answer


def _caches(output: Any) -> dict[str, Any]:
    names = list(output)  # an output of transformers 5.24 has the older names of its cache as attributes
    return {name: output[name] for name in CACHES if name in names and output[name] is not None}


def _truth(model: Any, ids: Tensor, row: int = 0) -> Tensor:
    """Logits `[T, V]` of one row in a single forward."""
    return _logits(model(**_inputs(model, ids, row), use_cache=False))[0]


def _distance(answer: Tensor, truth: Tensor) -> float:
    return float((answer.float() - truth.float()).abs().max() / truth.float().abs().max().clamp_min(1e-9))


def try_way(model: Any, way: str) -> float:
    """Return the twin's distance from a single forward, relative to the largest logit."""
    if way == AGAIN:
        return _try_again(model)
    if way in (PADDING_BEFORE, GAP_AS_RUN):
        return _try_among(model, _MASKED["padded" if way == PADDING_BEFORE else "gap"])
    if way in (PADDING_AFTER, MORE_AFTER):
        return _try_after(model, way == PADDING_AFTER)
    if way.startswith(("forward", "pieces", "whole")):
        return _try_forwards(model, way)
    return _try_generate(model, way)


def _try_generate(model: Any, way: str) -> float:
    # Ignore the model's own ends, penalties and forced tokens.
    model.generation_config = GenerationConfig(bos_token_id=1, decoder_start_token_id=1)
    config = GenerationConfig(
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=VOCABULARY,
        bos_token_id=1,
        decoder_start_token_id=1,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    # update() returns options outside of the configuration
    options: dict[str, Any] = {"generation_config": config, **config.update(**dict(WAYS[way].options))}
    masked = _MASKED.get(way, range(0))
    ids = torch.tensor(ROWS if way.startswith(("padded", "gap", "beams", "decoder")) else ROWS[:1])
    if is_encoder_decoder(model) and (way in ("turn", "beside", "padded") or "gap" in way.replace("decoder gap", "")):
        raise NotImplementedError("what its prompt is does not go on")
    if way.startswith("decoder"):
        if not is_encoder_decoder(model):
            raise NotImplementedError("its prompt is no other's")
        prompt = _with_columns(torch.tensor([(1, *row[1:]) for row in ROWS]), masked)
        # A different start token would be inserted.
        options |= {"decoder_input_ids": prompt.clamp_min(1), "decoder_attention_mask": (prompt != 0).long()}
        masked = range(0)
    if way.startswith("turn"):
        first_turn = model.generate(ids, **options)
        options |= _as_argument(model, _caches(first_turn))
        ids = torch.cat([first_turn.sequences, torch.tensor([[30, 31, 32]])], dim=1)
        options["attention_mask"] = torch.ones_like(ids)  # generated tokens may look like padding
    elif masked:
        ids = _with_columns(ids, masked)
    if masked:
        options["attention_mask"] = _with_columns(torch.ones_like(ids), masked)[:, : ids.shape[1]]
    if way == "beside":
        options["logits_processor"] = LogitsProcessorList([_AnotherSequence(model)])
    out = model.generate(ids, **options)
    if config.num_beams is not None and config.num_beams > 1:
        return _distance_of_beams(model, out, 1 if is_encoder_decoder(model) else ids.shape[1])
    read = [column for column in range(out.sequences.shape[1] - 1) if column not in _MASKED.get(way, ())]
    return max(
        _distance(
            torch.stack([step[row] for step in out.logits]),
            _truth(model, out.sequences[row : row + 1, read], row)[-len(out.logits) :],
        )
        for row in range(len(ids))
    )


# For a prompt of 7 tokens, or a first turn of 12.
_MASKED = {
    "padded": range(3),
    "padded, no cache": range(3),
    "gap": range(4, 7),
    "gap, no cache": range(4, 7),
    "turn, gap": range(9, 11),
    "decoder padded": range(3),
    "decoder gap": range(1, 4),  # after the start token
}


def _with_columns(ids: Tensor, columns: range) -> Tensor:
    """Insert columns of padding into rows `[B, T]`."""
    padding = torch.zeros(len(ids), len(columns), dtype=ids.dtype)
    return torch.cat([ids[:, : columns.start], padding, ids[:, columns.start :]], dim=1)


def _as_argument(model: Any, caches: Mapping[str, Any]) -> dict[str, Any]:
    name, cache = next(iter(caches.items()))
    parameters = inspect.signature(model.forward).parameters
    return {next((other for other in CACHES if other in parameters), name): cache}


def _distance_of_beams(model: Any, out: Any, width: int) -> float:
    """Compare beams' scores with their mean log probabilities."""
    worst = 0.0
    for row, sequence in enumerate(out.sequences):
        log_probabilities = _truth(model, sequence[None, :-1], row).log_softmax(-1)[width - 1 :]
        mean = float(log_probabilities.gather(1, sequence[width:, None]).mean())
        worst = max(worst, abs(float(out.sequences_scores[row]) - mean) / max(1.0, abs(mean)))
    return worst


class _AnotherSequence(LogitsProcessor):
    """Starts another sequence after each step."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._model(**_inputs(self._model, torch.tensor(ROWS[1:])), use_cache=True)
        return scores


def _try_forwards(model: Any, way: str) -> float:
    """Read a row whole, or in pieces through a cache."""
    width = len(ROWS[0])
    masked = range(3) if "padded" in way else range(2, 5) if "gapped" in way else range(0)
    n_padding = len(masked)
    pieces = (width,) if way.startswith("whole") else (3, 2, 2) if way.startswith("pieces") else (width - 3, 1, 1, 1)
    if n_padding and is_encoder_decoder(model):
        raise NotImplementedError("whose mask it is differs")
    caches: list[dict[str, Any]] = [{}, {}]
    rows, answers, at = [torch.tensor([row]) for row in ROWS], [], 0
    for size in pieces:
        for i, row in enumerate(rows[: 1 + (way == "forwards beside")]):
            begin = at + n_padding if at else 0  # padding is in the first piece
            end = at + size + n_padding
            padded = _with_columns(row, masked)
            real = torch.tensor([column not in masked for column in range(end)])
            inputs = _inputs(model, padded[:, begin:end])
            if "no positions" not in way and not is_encoder_decoder(model):
                inputs["position_ids"] = (real.cumsum(0) - 1).clamp_min(0)[None, begin:end]
            if "masked" in way or masked:
                inputs["attention_mask"] = real.long()[None]
            if not caches[i] and at:
                raise NotImplementedError("gives no cache to go on with")
            out = model(**inputs, **caches[i], use_cache=len(pieces) > 1)
            caches[i] = _caches(out)
            if i == 0:
                answers.append(_logits(out)[0][real[begin:]])
        at += size
    return _distance(torch.cat(answers), _truth(model, rows[0]))


def _try_after(model: Any, padding: bool) -> float:
    """A row followed by padding or tokens, against the row alone."""
    short, long = torch.tensor([ROWS[0] * 4]), torch.tensor([ROWS[1] * 6])
    ids = torch.cat([torch.cat([short, torch.zeros_like(long) if padding else long], dim=1)[:, : long.shape[1]], long])
    mask = torch.ones_like(ids)
    mask[0, short.shape[1] :] = int(not padding)
    decoder, _ = find_layers(model)
    # Long rows first: a short one changes big_bird's attention.
    followed, alone = (
        _logits(decoder(input_ids=x, attention_mask=y, use_cache=False))
        for x, y in ((ids, mask), (short, torch.ones_like(short)))
    )
    return _distance(followed[0, : short.shape[1]], alone[0])


def _try_among(model: Any, masked: range) -> float:
    """The first step with masked columns, against that without."""
    if is_encoder_decoder(model):
        raise NotImplementedError("what its prompt is does not go on")
    model.generation_config = GenerationConfig(bos_token_id=1)
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "pad_token_id": 0, "eos_token_id": VOCABULARY}
    ids = torch.tensor([ROWS[1] * 3])
    padded = _with_columns(ids, masked)
    alone, gapped = (
        model.generate(
            x, attention_mask=(x != 0).long(), return_dict_in_generate=True, output_logits=True, **options
        ).logits[0]
        for x in (ids, padded)
    )
    return _distance(gapped, alone)


def _try_again(model: Any) -> float:
    """A long row before and after a short one."""
    short, long = torch.tensor([ROWS[0][:3]]), torch.tensor([ROWS[1] * 3])
    decoder, _ = find_layers(model)
    before, _, after = (_logits(decoder(input_ids=ids, use_cache=False)) for ids in (long, short, long))
    return _distance(after[0], before[0])


def drops_mask(model: Any) -> bool:
    """True if the decoder does not receive the mask."""
    decoder, _ = find_layers(model)
    ids = torch.tensor(ROWS)
    if decoder is model or is_encoder_decoder(model):
        return False
    masks: list[Any] = []
    names = list(inspect.signature(decoder.forward).parameters)

    def note(module: Any, args: Any, kwargs: Any) -> None:
        masks.append({**dict(zip(names, args, strict=False)), **kwargs}.get("attention_mask"))

    handle = decoder.register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except Exception:  # it takes no mask
        return False
    finally:
        handle.remove()
    return all(mask is None for mask in masks)


def site_shapes(model: Any) -> dict[Kind, tuple[int, ...]]:
    """Return each kind of site's shape for two rows; models that need more than tokens may give none."""
    return {kind: tuple(hidden.shape) for kind, hidden in _given(model, ("resid_post", *BLOCKS)).items()}


def blocks_with_stream(model: Any) -> set[Kind]:
    """Return the kinds of blocks that add the stream: nonzero with zero weights. Changes the weights."""
    for _, _, block in _modules(model, BLOCKS):
        for name, parameter in block.named_parameters():
            # Norms keep scale one; their input is zero or the stream.
            parameter.fill_(float(parameter.dim() == 1 and name.endswith("weight")))
    outputs = _given(model, BLOCKS)
    return {kind for kind, hidden in outputs.items() if hidden.is_floating_point() and float(hidden.abs().max()) > 0}


def _modules(model: Any, words: Iterable[str]) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    _, layers = find_layers(model)
    for at, layer in enumerate(layers):
        for word in words:
            with suppress(UnsupportedModel):
                yield word, layer, site_module(layers, f"{word}.{at}")


def _given(model: Any, words: Iterable[str]) -> dict[Kind, Tensor]:
    """Each kind of site's output for two rows."""
    outputs: dict[Kind, Tensor] = {}

    def noting(kind: Kind) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(hidden, Tensor):
                outputs[kind] = hidden.clone()

        return hook

    handles = [
        module.register_forward_hook(noting((word, type(layer).__name__, type(module).__name__)))
        for word, layer, module in _modules(model, words)
    ]
    try:
        model(**_inputs(model, torch.tensor(ROWS)), use_cache=False)
    except Exception:  # it may need other inputs
        pass
    finally:
        for handle in handles:
            handle.remove()
    return outputs
