"""Compiled hosts keep their graphs: buffers take the states, and forwards are opened and closed around compiled calls.

    buffers = Buffers({"resid_post.15": layer})
    buffers.make_room((n_rows, n_tokens), width)    # before the forward
    buffers.keep("resid_post.15", hidden)           # inside it, traced: a copy and a count, which a graph repeats
    for site, hidden in buffers.written(): ...      # after it, copies

A hook that did its work inside a graph would break it, and would not run at all when a captured one is replayed. What
is traced here is a copy into memory that lies still, and one added to a count, by which a graph made without us, and
two threads in one graph, are noticed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probemon.errors import AlignmentError
from probemon.host.internals import COMPILED_CALL, keep_address, shadow_compiled_call
from probemon.host.model import compiled_parts, is_encoder_decoder
from probemon.util.shadow import Owner, shadow

# What torch says where a graph that may not break meets our hooks.
_NO_WHOLE_GRAPH = (
    "probemon watches this model and reads each forward outside of the graph, for which torch.compile(model,"
    " fullgraph=True) leaves no place: call model.compile(fullgraph=True) instead, or compile without fullgraph"
)


class _Forward(threading.local):
    """The forward that a thread has open: how often each site had been written before it."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}


class Buffers:
    """Room for the states of one forward, fp32, one buffer a site; it only grows while a host is watched.

    `own`: of sites that are no hidden states, how wide they are (None: there is no room for them) and whether their
    tokens come without rows.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], own: Mapping[str, tuple[int | None, bool]] | None = None
    ) -> None:
        self._modules, self._own = modules, own or {}
        self._room: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}  # how often, and of how many rows and tokens the last time
        self._forward = _Forward()
        self._lock = threading.Lock()
        self._open: dict[int | None, bool] = {}  # threads in a forward, and whether another was in one at the same time

    def holds(self, site: str, hidden: Tensor) -> bool:
        """Whether there is room for such states, so that `keep` may be traced."""
        return site in self._room and hidden.dim() == 3 and hidden.shape[2] == self._room[site].shape[2]

    def begin(self) -> None:
        """Note that the calling thread is in a forward, watched or not: what it runs is written to the same room."""
        with self._lock:
            alive = {thread.ident for thread in threading.enumerate()}
            open_now = {thread for thread in self._open if thread in alive} | {threading.get_ident()}
            self._open = dict.fromkeys(open_now, len(open_now) > 1)

    def make_room(self, shape: tuple[int, ...], width: int) -> None:
        """Begin a forward of `shape` rows and tokens, with room for its states.

        Tokens are rounded up to a power of two: a new buffer makes a graph anew.
        """
        self.begin()
        for site, module in self._modules.items():
            (n_rows, n_tokens), (wide, flat) = shape, self._own.get(site, (width, False))
            if wide is None:
                continue
            if flat:
                n_rows, n_tokens = 1, n_rows * n_tokens
            room = self._room.get(site)
            if room is None or len(room) < n_rows or room.shape[1] < n_tokens:
                device = next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))
                size = (n_rows, 1 << (n_tokens - 1).bit_length(), wide)
                with torch.inference_mode(False):  # else it could not be written outside of that mode
                    self._room[site] = torch.zeros(size, dtype=torch.float32, device=device)
                    self._written.setdefault(site, torch.zeros(3, dtype=torch.int64, device=device))
                for tensor in (self._room[site], self._written[site]):
                    keep_address(tensor)
            self._forward.before[site] = int(self._written[site][0])

    def keep(self, site: str, hidden: Tensor) -> None:
        """Copy `[B, T, D]`; plain operations on tensors, to be traced."""
        self._room[site][: hidden.shape[0], : hidden.shape[1]].copy_(hidden.detach())
        written = self._written[site]
        written[0].add_(1)
        written[1].fill_(hidden.shape[0])
        written[2].fill_(hidden.shape[1])

    def written(self) -> list[tuple[str, Tensor]]:
        """End the calling thread's forward; return the sites that `keep` was run for since `make_room`, with copies of
        their states.

        Raises `AlignmentError` if another thread's forward ran meanwhile.
        """
        found = []
        for site, count in self._forward.before.items():
            now, n_rows, n_tokens = self._written[site].tolist()
            if now != count:
                found.append((site, now - count, self._room[site][:n_rows, :n_tokens].clone()))
        shared = self.abandon()  # only now: who begins after it may write
        for site, n_times, _ in found:
            if shared:
                raise AlignmentError(
                    f"threads ran a compiled host at once, and both wrote to the buffer of {site}: whose states are"
                    " there cannot be told. Generate in one thread at a time"
                )
            if n_times != 1:
                raise AlignmentError(
                    f"{site} was run {n_times} times in one compiled call, and only its last states are there:"
                    " whose they are cannot be told. Compile the layers, or what runs once"
                )
        return [(site, states) for site, _, states in found]

    def abandon(self) -> bool:
        """End the calling thread's forward, however it went; return whether another thread's ran meanwhile."""
        self._forward.before = {}
        if not self._open:  # no thread runs compiled code
            return False
        with self._lock:
            return self._open.pop(threading.get_ident(), False)


class Bracket:
    """Opens and closes forwards around a host's compiled calls: the hooks that else do this leave the graph alone."""

    def __init__(self, before: Callable[..., None], after: Callable[..., None], failed: Callable[[], object]) -> None:
        self._before, self._after, self._failed = before, after, failed
        self._thread = threading.local()
        self._n_open = 0
        self._lock = threading.Lock()
        self.tracing = False  # a bool, not the count: a graph is made anew when it changes

    @property
    def is_open(self) -> bool:
        """Whether the calling thread is inside of a bracket."""
        return bool(getattr(self._thread, "open", False))

    def unless(self, hook: Callable[..., None]) -> Callable[..., None]:
        """A hook that does nothing where a bracket does its work, and leaves the graph of any other compiled code."""
        # A partial, not a closure: who copies or pickles the model finds in it whose hook this is.
        return partial(self._unless, hook, torch.compiler.disable(hook, reason=_NO_WHOLE_GRAPH))

    def _unless(self, hook: Callable[..., None], disabled: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # not is_compiling, which is also true while another thread compiles
            if not self.tracing:
                disabled(*args, **kwargs)
        elif not self.is_open:
            hook(*args, **kwargs)

    def shadow(self, stack: ExitStack, owner: Owner, model: Any, decoder: nn.Module) -> None:
        """Put brackets around the compiled calls of a model and of its decoder until `stack` closes.

        These are generate's own, those of `module.compile()`, and a `forward` that was compiled.
        """
        names = {module: list(inspect.signature(module.forward).parameters) for module in (model, decoder)}

        def around(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or self.is_open:
                return original(*args, **kwargs)
            given = {**dict(zip(names[module], args, strict=False)), **kwargs}
            if module is not decoder and is_encoder_decoder(model):
                given = _of_decoder(given)
            ids = given.get("input_ids")
            if (isinstance(ids, Tensor) and ids.dim() != 2) or (ids is None and given.get("inputs_embeds") is None):
                # What the decoder will run is not said here: its own hooks see it, outside of the graph.
                return original(*args, **kwargs)
            self._thread.open = True
            try:
                self._before(decoder, (), given)
                with self._traced():
                    out = original(*args, **kwargs)
            except BaseException:
                self._failed()
                raise
            finally:
                self._thread.open = False
            self._after(decoder, (), out)
            return out

        def compiled_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            compiled = original(*args, **kwargs)
            return partial(around, model, compiled)

        shadow_compiled_call(stack, owner, model, compiled_call)
        for module, name in compiled_parts(model):
            # A compiled forward of the decoder itself has the decoder's hooks around it.
            if module in names and (module is not decoder or name == COMPILED_CALL):
                shadow(stack, owner, module, name, partial(around, module))

    @contextmanager
    def _traced(self) -> Iterator[None]:
        with self._lock:
            self._n_open += 1
            self.tracing = True
        try:
            yield
        finally:
            with self._lock:
                self._n_open -= 1
                self.tracing = self._n_open > 0


def _of_decoder(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the decoder of an encoder-decoder is given of the model's arguments, as far as tokens are placed by it."""
    renamed = {name.removeprefix("decoder_"): value for name, value in given.items() if name.startswith("decoder_")}
    return {**renamed, "past_key_values": given.get("past_key_values"), "cache_position": given.get("cache_position")}
