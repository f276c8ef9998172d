"""Abilities: whether a host's own answer is right in the way it is about to be run, tried on a tiny copy of it.

    abilities = Abilities(model)
    abilities.check_streams(["resid_post.3"])   # raises NotSupportedHost where that is no [rows, tokens, hidden size]
    abilities.check_generate({"beams"})         # raises NotSupportedDecoding where it cannot reorder its state
    abilities.check_forward(used=True, several=True, positions=False)  # of a forward outside generate()

A host may forget its state, leave it with the wrong beam, start it anew or let padding into it, and its own answer is
then wrong. What it can do does not show in the names of its classes, so a twin of it (`probemon.host.twin`) is run in
that very way, and once in one forward over the same tokens: the two answers must be one. A host that answers otherwise
already when it generates without a cache (one that is not causal, or whose attention chooses among all tokens there
are) does so by design, and is never refused. Each way is tried once for each class and kind of configuration, in some
tenths of a second.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from probemon.core.probes import parse_site
from probemon.errors import NotSupportedDecoding, NotSupportedHost
from probemon.host.internals import is_stateful
from probemon.host.model import find_layers, hidden_size, is_encoder_decoder, site_module, unwrap
from probemon.host.twin import VOCABULARY, own_randomness, shrunken, twin, window_of

CACHES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")  # what hosts call it
BAR = 1e-2  # of the largest logit: rounding stays below 3e-3, a state that is lost or another row's is above 5e-2
PADDING_AFTER, MORE_AFTER = "padding after", "more after"
LENGTHS_MATTER = ("longrope", "dynamic")  # one long row changes how positions are told apart in all rows
ROWS = ((1, 44, 3, 17, 8, 44, 3), (5, 9, 13, 7, 21, 22, 23))
NEW = 5


@dataclass(frozen=True)
class Way:
    """One way of running a host: its name, what a host that fails it cannot do, what to do instead, options."""

    name: str
    cannot: str
    remedy: str
    options: tuple[tuple[str, Any], ...] = ()


def _forward_ways() -> dict[str, Way]:
    """Plain forwards with a mask, with padding, without position_ids."""
    kinds = {
        "whole": ("a plain forward", "of one length, or row by row"),
        "forward": ("a plain forward on a used cache", "with use_cache=False and all tokens, or use generate()"),
        "pieces": ("a forward of several tokens on a used cache", "one by one, or all at once without a cache"),
    }
    masks = {
        "": ("", "", ""),
        ", masked": (" with an attention mask", "take a mask of all its columns", "Leave the mask out"),
        ", padded": (" with padding before its tokens", "leave padding out", ""),
    }
    ways = {}
    for kind, (name, instead) in kinds.items():
        for mask, (mask_name, cannot, mask_remedy) in masks.items():
            for without in ("", ", no positions"):
                if (mask, without) == ("", "") or (kind == "whole" and mask != ", padded"):
                    continue
                remedies = [*(["Give position_ids"] if without else []), *([mask_remedy] if mask_remedy else [])]
                ways[f"{kind}{mask}{without}"] = Way(
                    f"{name}{mask_name}{' without position_ids' if without else ''}",
                    "count the tokens before" if without and mask != ", padded" else cannot,
                    ", or ".join([*remedies, f"{'pass' if remedies else 'Pass'} them {instead}"]),
                )
    return ways


WAYS = {
    "no cache": Way("generate() without a cache", "answer as in one forward", "", (("use_cache", False),)),
    "steps": Way("generate() with a cache", "go on from its own state", "use_cache=False"),
    "padded": Way("a left-padded batch", "leave padding out", "Generate for rows of one length, or one by one"),
    "padded, no cache": Way(
        "a left-padded batch",
        "leave padding out",
        "Generate for rows of one length, or one by one",
        (("use_cache", False),),
    ),
    "beams": Way(
        "beam search with a cache",
        "reorder all of its state with its beams",
        "use_cache=False, or num_beams=1",
        (("num_beams", 3),),
    ),
    "turn": Way("a used cache (a second turn)", "go on from it in generate()", "Start with an empty cache"),
    "static": Way(
        "a static cache", "go on from it", "Leave cache_implementation out", (("cache_implementation", "static"),)
    ),
    "chunked": Way(
        "a prompt in chunks (prefill_chunk_size)",
        "go on from its state with several tokens",
        "Leave prefill_chunk_size out",
        (("prefill_chunk_size", 3),),
    ),
    "speculative": Way(
        "assisted generation",
        "take back what was drafted",
        "Leave the assistant out",
        (("prompt_lookup_num_tokens", 2),),
    ),
    "beside": Way(
        "a generate() beside another",
        "keep the states of two sequences apart: they are inside its modules",
        "Generate one after the other",
    ),
    "forward": Way(
        "a plain forward on a used cache",
        "go on from its own state",
        "Give use_cache=False and all tokens, or use generate()",
    ),
    "pieces": Way(
        "a forward of several tokens on a used cache",
        "go on from its state with several tokens",
        "Pass them one by one, or all at once without a cache",
    ),
    **_forward_ways(),
    "forwards beside": Way(
        "a plain forward on a used cache",
        "keep the states of two sequences apart: they are inside its modules",
        "Give use_cache=False and all tokens, or use generate()",
    ),
}

_SIMPLEST = (
    "steps",
    "padded",
    "padded, no cache",
    "forward",
)  # what every host that keeps a state is expected to be able to do


class Abilities:
    """What one host can do. Never touches it: everything is tried on a twin."""

    def __init__(self, model: Any) -> None:
        self._model = unwrap(model)

    def check_streams(self, sites: Sequence[Any]) -> None:
        """Raises `NotSupportedHost` where such layers are known not to give a token one state of the hidden size."""
        tried = _tried(self._model)
        names = [site for site in sites if isinstance(site, str)]
        if tried is None or not names:
            return
        _, layers = find_layers(self._model)
        for site in names:
            kind, at = parse_site(site)
            shape = (
                tried.shapes().get((kind, type(layers[at]).__name__, type(site_module(layers, site)).__name__))
                if at < len(layers)
                else None
            )
            if shape is not None and shape != (2, len(ROWS[0]), tried.width):
                told = ", ".join(str(n) if n != tried.width else "D" for n in shape)
                raise NotSupportedHost(
                    f"{site} of {type(self._model).__name__} is no stream of hidden states: for 2 rows of "
                    f"{len(ROWS[0])} tokens a tiny copy of it (D = {tried.width}) gives "
                    f"[{told}], expected [2, {len(ROWS[0])}, D]. Choose another site"
                )

    def check_generate(self, ways: Iterable[str], length: int = 0) -> None:
        """Raises `NotSupportedDecoding` where the host's own answer is wrong in one of these `WAYS` of generating.

        `length`: how long the sequence may become. Windows of attention are crossed on the twin if they will be.
        """
        self._check([way for way in WAYS if way in set(ways)], length)

    def check_forward(self, *, used: bool, several: bool, positions: bool, mask: str = "", length: int = 0) -> None:
        """The same of a plain forward, with `several` tokens or one, with `position_ids` or without.

        `used`: on a used cache. `mask`: "" for none, "masked" where it says that all are tokens, "padded" for padding
        before them.
        """
        more = f"{f', {mask}' if mask else ''}{'' if positions else ', no positions'}"
        if used:
            self._check(
                [*(["pieces", f"pieces{more}"] if several else []), f"forward{more}", "forwards beside"], length
            )
        elif mask == "padded":
            self._check([f"whole{more}"], length)

    def takes_padding(self, length: int = 0) -> bool:
        """Whether padding after a row, under a mask, is known to change none of its states; rows may be up to `length`
        long.
        """
        if any(kind in LENGTHS_MATTER for kind in _rope_types(self._model.config.to_dict())):
            return False
        tried = _tried(self._model, length)
        apart = None if tried is None else tried.apart(PADDING_AFTER)
        return apart is not None and apart <= BAR

    def looks_ahead(self, length: int = 0) -> bool:
        """Whether a token's state may depend on tokens after it; rows may be up to `length` long."""
        tried = _tried(self._model, length)
        apart = None if tried is None else tried.apart(MORE_AFTER)
        return apart is None or not apart <= BAR

    def drops_mask(self) -> bool:
        """Whether the host's forward takes an attention mask and its decoder, as far as is known, is never given it."""
        tried = _tried(self._model)
        return tried is not None and tried.drops_mask

    def _check(self, ways: Sequence[str], length: int) -> None:
        tried = _tried(self._model, length)
        name = type(self._model).__name__
        if tried is None:
            if is_stateful(self._model) and (bad := [way for way in ways if way not in _SIMPLEST]):
                raise NotSupportedDecoding(
                    f"{WAYS[bad[0]].name} is not supported for {name}: it keeps a state, and no tiny copy of "
                    "it could be made to see whether it can "
                    f"{WAYS[bad[0]].cannot}. {WAYS[bad[0]].remedy}, or detach"
                )
            return
        for way in ways:
            apart = tried.apart(way)
            if apart is not None and not apart <= BAR and not tried.depends_on_the_cut:
                raise NotSupportedDecoding(
                    f"{WAYS[way].name} is not supported for {name}, whose own answer is wrong there: it does not "
                    f"{WAYS[way].cannot} (logits of a tiny copy of it are {apart:.2g} of the largest away from those "
                    f"of one forward). {WAYS[way].remedy}, or detach"
                )


class _Tried:
    """A twin, and what it has been tried at."""

    def __init__(self, kind: type, config: Any) -> None:
        self._apart: dict[str, float | None] = {}
        self._shapes: dict[tuple[str, str, str], tuple[int, ...]] | None = None
        self._drops: bool | None = None
        self._lock = threading.RLock()
        with _alone():
            self._model = twin(kind, config)
            self.width = hidden_size(self._model)

    def apart(self, way: str) -> float | None:
        """How far the twin is from its own single forward, of the largest logit; None where it cannot be run so."""
        with self._lock:
            if way not in self._apart:
                with _alone():
                    try:
                        self._apart[way] = _try(copy.deepcopy(self._model), way)
                    except Exception:  # the host says by itself that it cannot
                        self._apart[way] = None
            return self._apart[way]

    @property
    def depends_on_the_cut(self) -> bool:
        """Whether even without a cache, and without padding, a token's answer depends on how many come after it."""
        apart = self.apart("no cache")
        return apart is not None and not apart <= BAR

    @property
    def drops_mask(self) -> bool:
        """Whether a mask of the outer forward does not come to the decoder."""
        with self._lock:
            if self._drops is None:
                with _alone():
                    self._drops = _drops_mask(copy.deepcopy(self._model))
            return self._drops

    def shapes(self) -> dict[tuple[str, str, str], tuple[int, ...]]:
        """What each kind of site gives for two rows, by classes of layer and module."""
        with self._lock:
            if self._shapes is None:
                with _alone():
                    self._shapes = _shapes(copy.deepcopy(self._model))
            return self._shapes


_TRIED: dict[tuple[type, str], _Tried | None] = {}
_BY_MODEL: weakref.WeakKeyDictionary[Any, dict[bool, _Tried | None]] = weakref.WeakKeyDictionary()
_TRYING = threading.RLock()
SHORT, LONG = 8, 64  # windows of a twin: its sequences are longer than the one and shorter than the other


def _tried(model: Any, length: int = 0) -> _Tried | None:
    """The twin of a host's class and configuration for sequences of `length`; None where none can be made."""
    with _TRYING:
        known = _BY_MODEL.setdefault(model, {})
        try:
            crossed = length > (window_of(model.config) or length)
            if crossed not in known:
                known[crossed] = None
                config = shrunken(model.config, SHORT if crossed else LONG)
                key = type(model), json.dumps(config.to_dict(), sort_keys=True, default=str)
                if key not in _TRIED:
                    _TRIED[key] = _Tried(type(model), config)
                known[crossed] = _TRIED[key]
            return known[crossed]
        except Exception:  # of every kind: what a foreign configuration does with other sizes is not known
            return None


@contextmanager
def _alone() -> Iterator[None]:
    """Nothing around the caller is in force for the twin, and it leaves nothing: random numbers, autocast, device."""
    with (
        torch.inference_mode(False),
        own_randomness(0),
        torch.device("cpu"),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _inputs(model: Any, ids: Tensor, first: int = 0) -> dict[str, Tensor]:
    """Rows `ids [B, T]` of a decoder; an encoder is given row `first` of `ROWS` and those after it."""
    return (
        {"input_ids": torch.tensor(ROWS)[first : first + len(ids)], "decoder_input_ids": ids}
        if is_encoder_decoder(model)
        else {"input_ids": ids}
    )


def _logits(made: Any) -> Tensor:
    found = getattr(made, "logits", None)
    answer: Tensor = found if found is not None else made.last_hidden_state
    return answer


def _truth(model: Any, ids: Tensor, row: int = 0) -> Tensor:
    """Of one row `[1, T]`, which is row `row` of its batch, in one forward without a cache."""
    return _logits(model(**_inputs(model, ids, row), use_cache=False))[0]


def _far(given: Tensor, truth: Tensor) -> float:
    return float((given.float() - truth.float()).abs().max() / truth.float().abs().max().clamp_min(1e-9))


def _rope_types(config: Any) -> Iterator[str]:
    """The kinds of rotary positions that a configuration, as a dict, names anywhere."""
    for name, value in config.items():
        if name in ("rope_type", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from _rope_types(value)


def _try(model: Any, way: str) -> float:
    if way in (PADDING_AFTER, MORE_AFTER):
        return _try_after(model, way == PADDING_AFTER)
    if way.startswith(("forward", "pieces", "whole")):
        return _try_forwards(model, way)
    return _try_generate(model, way)


def _try_generate(model: Any, way: str) -> float:
    model.generation_config = GenerationConfig(
        bos_token_id=1, decoder_start_token_id=1
    )  # what its own says of ends, penalties and forced tokens does not matter here
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
    options: dict[str, Any] = {"generation_config": config, **dict(WAYS[way].options)}
    ids = torch.tensor(ROWS if way in ("padded", "padded, no cache", "beams") else ROWS[:1])
    first = 0
    if way.startswith("padded"):
        first, ids = 3, torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], dim=1)
        options["attention_mask"] = (ids != 0).long()
    if is_encoder_decoder(model) and way in ("turn", "beside", "padded"):
        raise NotImplementedError("what its prompt is does not go on")
    if way == "turn":
        made = model.generate(ids, **options)
        held = [getattr(made, name) for name in CACHES if getattr(made, name, None) is not None]
        options[_own_name(model)] = held[0]
        ids = torch.cat([made.sequences, torch.tensor([[30, 31, 32]])], dim=1)
    if way == "beside":
        return _beside(model, ids, options)
    made = model.generate(ids, **options)
    if "num_beams" in options:
        return _beams_apart(model, made, 1 if is_encoder_decoder(model) else ids.shape[1])
    return max(
        _far(
            torch.stack([step[row] for step in made.logits]),
            _truth(model, made.sequences[row : row + 1, first:-1], row)[-len(made.logits) :],
        )
        for row in range(len(ids))
    )


def _own_name(model: Any) -> str:
    names = [name for name in CACHES if name in inspect.signature(model.forward).parameters]
    return names[0] if names else CACHES[0]


def _beams_apart(model: Any, made: Any, width: int) -> float:
    """The score that each sequence was chosen by, against the mean log probability of its tokens; of the latter."""
    worst = 0.0
    for row, line in enumerate(made.sequences):
        sure = _truth(model, line[None, :-1], row).log_softmax(-1)[width - 1 :]
        mean = float(sure.gather(1, line[width:, None]).mean())
        worst = max(worst, abs(float(made.sequences_scores[row]) - mean) / max(1.0, abs(mean)))
    return worst


def _beside(model: Any, ids: Tensor, options: dict[str, Any]) -> float:
    """One sequence, while after each of its steps another begins to be read."""

    class Other(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            model(**_inputs(model, torch.tensor(ROWS[1:])), use_cache=True)
            return scores

    made = model.generate(ids, logits_processor=LogitsProcessorList([Other()]), **options)
    return _far(
        torch.stack([step[0] for step in made.logits]), _truth(model, made.sequences[:1, :-1])[-len(made.logits) :]
    )


def _try_forwards(model: Any, way: str) -> float:
    """A row whole, or in pieces, each going on from the cache that the one before gave."""
    width, n_padding = len(ROWS[0]), 3 if "padded" in way else 0
    pieces = (width,) if way.startswith("whole") else (3, 2, 2) if way.startswith("pieces") else (width - 3, 1, 1, 1)
    if n_padding and is_encoder_decoder(model):
        raise NotImplementedError("whose mask it is differs")
    held: list[dict[str, Any]] = [{}, {}]
    rows, answers, at = [torch.tensor([row]) for row in ROWS], [], 0
    for size in pieces:
        for i, row in enumerate(rows[: 1 + (way == "forwards beside")]):
            begin = at + n_padding if at else 0  # padding comes with the first piece
            end = at + size + n_padding
            padded = torch.cat([torch.zeros(1, n_padding, dtype=row.dtype), row], dim=1)
            given = _inputs(model, padded[:, begin:end])
            if "no positions" not in way and not is_encoder_decoder(model):
                given["position_ids"] = (torch.arange(begin, end) - n_padding).clamp_min(0)[None]
            if "masked" in way or "padded" in way:
                given["attention_mask"] = (torch.arange(end) >= n_padding).long()[None]
            if not held[i] and at:
                raise NotImplementedError("gives no cache to go on with")
            made = model(**given, **held[i], use_cache=len(pieces) > 1)
            held[i] = {name: getattr(made, name) for name in CACHES if getattr(made, name, None) is not None}
            if i == 0:
                answers.append(_logits(made)[0][n_padding if not at else 0 :])
        at += size
    return _far(torch.cat(answers), _truth(model, rows[0]))


def _try_after(model: Any, padding: bool) -> float:
    """A row that goes on, by padding beside a longer one or by more tokens, against the same row alone; beyond a short
    window.
    """
    short, long = torch.tensor([ROWS[0] * 2]), torch.tensor([ROWS[1] * 3])
    ids = torch.cat([torch.cat([short, torch.zeros_like(long) if padding else long], dim=1)[:, : long.shape[1]], long])
    mask = torch.ones_like(ids)
    mask[0, short.shape[1] :] = int(not padding)
    decoder, _ = find_layers(model)
    alone, beside = (
        _logits(decoder(input_ids=x, attention_mask=y, use_cache=False))
        for x, y in ((short, torch.ones_like(short)), (ids, mask))
    )
    return _far(beside[0, : short.shape[1]], alone[0])


def _drops_mask(model: Any) -> bool:
    decoder, _ = find_layers(model)
    ids = torch.tensor(ROWS)
    if decoder is model or is_encoder_decoder(model):
        return False
    given: list[Any] = []
    names = list(inspect.signature(decoder.forward).parameters)
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(
            {**dict(zip(names, args, strict=False)), **kwargs}.get("attention_mask")
        ),
        with_kwargs=True,
    )
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except Exception:  # it takes no mask, and says so
        return False
    finally:
        handle.remove()
    return all(mask is None for mask in given)


def _shapes(model: Any) -> dict[tuple[str, str, str], tuple[int, ...]]:
    _, layers = find_layers(model)
    seen: dict[tuple[str, str, str], tuple[int, ...]] = {}
    handles = []
    for at, layer in enumerate(layers):
        for kind in ("resid_post", "attn_out", "mlp_out"):
            try:
                module = site_module(layers, f"{kind}.{at}")
            except NotSupportedHost:
                continue
            handles.append(
                module.register_forward_hook(_note(seen, (kind, type(layer).__name__, type(module).__name__)))
            )
    try:
        model(**_inputs(model, torch.tensor(ROWS)), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _note(seen: dict[Any, tuple[int, ...]], key: Any) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(hidden, Tensor):
            seen[key] = tuple(hidden.shape)

    return hook
