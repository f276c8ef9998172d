"""Reads a `generate()` call's arguments before it runs.

    prompt = read_call(model, args, kwargs)
    prompt.columns, prompt.offset

Modes that cannot be attributed exactly are refused.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    StaticCache,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.configuration_utils import GenerationMode

from probemon.errors import ConfigError, UnsupportedDecoding
from probemon.host.cache import check_layers, counted_columns
from probemon.host.internals import (
    attention_kind,
    cache_among,
    cache_layers,
    decoder_cache,
    generation_config,
    tensors_of,
)
from probemon.host.model import is_encoder_decoder
from probemon.host.trials import CACHES

LOG = logging.getLogger("probemon")
_TOLD: weakref.WeakSet[Any] = weakref.WeakSet()  # warned of left padding
_CACHES = (None, "dynamic", "dynamic_full", "offloaded", "static", "offloaded_static")
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION, *_BEAMS)


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate()`.

    - `columns`: of the prompt, cached ones included
    - `offset`: the output's first column
    - `speculative`: drafts run in one forward
    - `chunked`: the prompt runs in pieces
    - `n_beams`, `n_sequences`: searched and returned per prompt
    - `cached`: columns in `cache`
    - `ids [B, L]`: the prompt from `offset` on, if partly cached
    - `ways`: required abilities (`probemon.host.trials.WAYS`)
    - `length`: columns at most
    """

    columns: int
    offset: int
    speculative: bool = False
    chunked: bool = False
    n_beams: int = 1
    n_sequences: int = 1
    cached: int = 0
    cache: Any = None
    ids: Any = None
    ways: frozenset[str] = frozenset()
    length: int = 0


def read_call(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GenerateCall:
    """Read `model.generate(*args, **kwargs)`.

    Raises `UnsupportedDecoding`, `ConfigError` for an empty prompt, `AlignmentError` for an interrupted forward's
    cache.
    """
    from transformers.generation import GenerationMixin  # brings torch._dynamo, which a model has imported anyway

    if type(model).generate is not GenerationMixin.generate:
        raise UnsupportedDecoding(f"{type(model).__name__} has its own generate(): rows cannot be attributed")
    _refuse(
        "generate() while continuous batching runs on the model, whose attention it has changed,",
        attention_kind(model.config).startswith("paged"),
    )
    bound = inspect.signature(GenerationMixin.generate).bind(model, *args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    arguments = {**bound, **extra}
    _refuse("a custom generate recipe (custom_generate)", arguments.get("custom_generate") is not None)
    _refuse("generation over several processes (synced_gpus)", bool(arguments.get("synced_gpus")))
    guided = any(
        isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor)
        for processor in arguments.get("logits_processor") or ()
    )
    _refuse(
        "classifier-free guidance (UnbatchedClassifierFreeGuidanceLogitsProcessor), which runs the model on a second"
        " prompt,",
        guided,
    )
    cache = cache_among(arguments)
    allowed = EncoderDecoderCache if is_encoder_decoder(model) else (DynamicCache, StaticCache)
    _refuse(f"a cache of class {type(cache).__name__}", cache is not None and not isinstance(cache, allowed))
    _refuse("continuous batching (cache_implementation='paged')", arguments.get("cache_implementation") == "paged")
    check_layers(cache, model)
    config = generation_config(model, arguments.get("generation_config"), extra)
    mode = _check_config(config, arguments)
    options: dict[str, Any] = {
        "speculative": mode == GenerationMode.ASSISTED_GENERATION,
        "chunked": config.prefill_chunk_size is not None,
        "n_beams": int(config.num_beams) if mode in _BEAMS else 1,
        "n_sequences": int(config.num_return_sequences or 1),
        "cached": counted_columns(cache),
        "cache": cache,
        "ways": _ways(config, mode, arguments, is_encoder_decoder(model)),
        "length": _length(config, arguments),
    }
    if is_encoder_decoder(model):
        # transformers cuts the encoder's mask by mistake.
        _refuse("chunked prefill of an encoder-decoder (prefill_chunk_size)", options["chunked"])
        return GenerateCall(_decoder_columns(config, arguments), 0, **options)
    ids = arguments.get("input_ids")
    ids = arguments.get("inputs") if ids is None else ids
    embeds, n_ids = arguments.get("inputs_embeds"), 0 if ids is None else int(ids.shape[-1])
    if embeds is not None and embeds.shape[1] == 0:
        raise ConfigError(
            f"the prompt has zero length (inputs_embeds of shape {tuple(embeds.shape)}): give at least one token"
        )
    if embeds is not None and n_ids == 0:
        return GenerateCall(
            int(embeds.shape[1]), int(embeds.shape[1]), **options
        )  # the output has generated tokens only
    _refuse(f"inputs_embeds next to {n_ids} input_ids", embeds is not None and embeds.shape[1] != n_ids)
    if ids is None:  # starts from a BOS token
        if embeds is None and arguments.get("attention_mask") is None and isinstance(config.bos_token_id, int):
            _check_inferred(model, config, torch.tensor([[config.bos_token_id]]))
        return GenerateCall(1, 0, **options)
    width = int(ids.shape[-1])
    if ids.numel() == 0:
        raise ConfigError(
            f"the prompt has zero length (input_ids of shape {tuple(ids.shape)}): give at least one token"
        )
    options["ids"] = ids if options["cached"] else None
    mask = arguments.get("attention_mask")
    if mask is None:
        _check_inferred(model, config, ids)
    if mask is None or mask.dim() != 2:
        return GenerateCall(width, 0, **options)
    empty = (mask.sum(dim=1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigError(
            f"the prompt of row {empty[0]} has zero length (its attention_mask is all 0): give at least one token"
        )
    return GenerateCall(int(mask.shape[1]), int(mask.shape[1]) - width, **options)


def _inferred_mask(model: Any, config: GenerationConfig, ids: Tensor) -> Tensor | None:
    """Return transformers' inferred mask; None if it takes all for text."""
    pad, takes_mask = config.pad_token_id, "attention_mask" in inspect.signature(model.forward).parameters
    if not isinstance(pad, int) or pad in _ends(config) or ids.dim() != 2 or not takes_mask:
        return None
    return ids != pad


def _ends(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return list(ends) if isinstance(ends, (list, tuple)) else [] if ends is None else [ends]


def _check_inferred(model: Any, config: GenerationConfig, ids: Tensor) -> None:
    """Raise `ConfigError` if the inferred mask hides a row; warn once if left padding is read as text."""
    mask = _inferred_mask(model, config, ids)
    if mask is not None:
        empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
        if empty:
            raise ConfigError(
                f"the prompt of row {empty[0]} has zero length: every token of it is the padding token"
                f" {config.pad_token_id}, so that without an attention_mask transformers takes it for padding. Give an"
                " attention_mask, of ones if these tokens are text"
            )
        return
    pad = config.pad_token_id if isinstance(config.pad_token_id, int) else next(iter(_ends(config)), None)
    if pad is None or ids.dim() != 2 or model in _TOLD:
        return
    n_leading = (ids == pad).long().cumprod(dim=1).sum(dim=1)
    # A single one in each row may be text.
    if bool((n_leading > 1).any()) or len(set(n_leading.tolist())) > 1:
        _TOLD.add(model)
        LOG.warning(
            "row %d begins with %d padding tokens (%d), no attention_mask was given, and transformers infers none, as"
            " this token also ends a text: the model reads the padding as text, and it is scored as such. Give the"
            " attention_mask of the tokenizer",
            int(n_leading.argmax()),
            int(n_leading.max()),
            pad,
        )


def _length(config: GenerationConfig, arguments: Mapping[str, Any]) -> int:
    width = max(
        (
            int(arguments[name].shape[1])
            for name in ("input_ids", "inputs", "inputs_embeds", "attention_mask")
            if isinstance(arguments.get(name), Tensor)
        ),
        default=1,
    )
    return (
        width + int(config.max_new_tokens)
        if config.max_new_tokens is not None
        else max(width, int(config.max_length or 0))
    )


def _ways(
    config: GenerationConfig, mode: GenerationMode, arguments: Mapping[str, Any], encoder_decoder: bool
) -> frozenset[str]:
    """Required abilities; an encoder-decoder's mask is the encoder's."""
    mask, ids, pad = (
        arguments.get("attention_mask"),
        arguments.get("input_ids", arguments.get("inputs")),
        config.pad_token_id,
    )
    if (
        mask is None
        and isinstance(ids, Tensor)
        and ids.dim() == 2
        and isinstance(pad, int)
        and pad not in _ends(config)
    ):
        mask = ids != pad  # as transformers infers it
    padded = gap = False
    if not encoder_decoder and isinstance(mask, Tensor) and mask.dim() == 2 and 0 not in mask.shape:
        padded, real = bool((mask[:, 0] == 0).any()), mask != 0
        gap = bool((~real & (real.cumsum(dim=1) > 0) & (real.flip(1).cumsum(dim=1).flip(1) > 0)).any())
        after = ((mask[:, -1] == 0) & (mask != 0).any(dim=1)).nonzero().flatten().tolist()
        if after:
            raise UnsupportedDecoding(
                f"the prompt of row {after[0]} ends in padding, and generate() would read its first token off the"
                ' padding: the model\'s own answer is wrong. Pad on the left: tokenizer.padding_side = "left"'
            )
    decoder_way = _padding_of_decoder(config, arguments) if encoder_decoder else ""
    if config.use_cache is False:
        without = {"padded, no cache": padded, "gap, no cache": gap, decoder_way: bool(decoder_way)}
        return frozenset(way for way, present in without.items() if present)
    used = any(_is_used(arguments.get(name)) for name in CACHES)
    static = "static" in str(config.cache_implementation) or isinstance(cache_among(arguments), StaticCache)
    needed = {
        "steps": not static,
        "static": static,
        "padded": padded,
        decoder_way: bool(decoder_way),
        "gap": gap and not used,
        "turn, gap": gap and used,
        "beams": mode in _BEAMS,
        "speculative": mode == GenerationMode.ASSISTED_GENERATION,
        "chunked": config.prefill_chunk_size is not None,
        "turn": used,
    }
    return frozenset(way for way, present in needed.items() if present)


def _padding_of_decoder(config: GenerationConfig, arguments: Mapping[str, Any]) -> str:
    """The way of a padded decoder prompt, or ""."""
    mask, ids = arguments.get("decoder_attention_mask"), arguments.get("decoder_input_ids")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool((mask.diff(dim=1) > 0).any()):
        return ""
    starts = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    put_before = isinstance(ids, Tensor) and bool((ids[:, 0] != starts).all())
    between = bool(((mask != 0).cumsum(dim=1)[:, :-1][mask.diff(dim=1) > 0] > 0).any())
    return "decoder gap" if put_before or between else "decoder padded"


def _is_used(cache: Any) -> bool:
    """True for unknown layers too."""
    cache = decoder_cache(cache)
    if not isinstance(cache, Cache):
        return cache is not None
    return any(tensors_of(layer) for layer in cache_layers(cache))


def _decoder_columns(config: GenerationConfig, arguments: Mapping[str, Any]) -> int:
    """Columns of the decoder prompt; a missing start token is added."""
    ids = arguments.get("decoder_input_ids")
    if ids is None and arguments.get("inputs") is not None:
        ids = arguments.get("input_ids")  # `inputs` may be sound
    if ids is None:
        return 1
    _refuse("a decoder_start_token_id for each row", isinstance(config.decoder_start_token_id, list))
    start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
    return int(ids.shape[1]) + int(start is None or not bool((ids[:, 0] == start).any()))


def _check_config(config: GenerationConfig, arguments: Mapping[str, Any]) -> GenerationMode:
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    _refuse(f"{mode.value.replace('_', ' ')}", mode not in _MODES)
    guidance = config.guidance_scale
    _refuse("classifier-free guidance (guidance_scale)", guidance is not None and guidance != 1)
    _refuse("token healing", bool(config.token_healing))
    _refuse(f"cache_implementation={config.cache_implementation!r}", config.cache_implementation not in _CACHES)
    return mode


def _refuse(mode: str, present: bool) -> None:
    if present:
        raise UnsupportedDecoding(
            f"{mode} is not supported while probemon is attached: which row and token a hidden state belongs to would"
            " be a guess. Use greedy decoding or sampling, or detach"
        )
