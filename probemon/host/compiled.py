"""Reads compiled models without graph breaks.

    buffers = Buffers({"resid_post.15": layer})
    buffers.make_room((n_rows, n_tokens), width)    # before the forward
    buffers.keep("resid_post.15", hidden)           # inside it, traced
    for site, hidden in buffers.written(): ...      # after it

A captured graph runs no Python hooks: it copies into fixed memory and increments a counter, which reveals graphs made
without us and threads that share a graph.
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
from probemon.host.internals import COMPILED_CALL, cache_among, keep_address, patch_compiled_call
from probemon.host.model import compiled_parts, is_encoder_decoder
from probemon.util.shadow import Owner, shadow

# Shown by torch if fullgraph=True meets our hooks.
_NO_WHOLE_GRAPH = (
    "probemon watches this model and reads each forward outside of the graph, for which torch.compile(model,"
    " fullgraph=True) leaves no place: call model.compile(fullgraph=True) instead, or compile without fullgraph"
)


class _Forward(threading.local):
    """Write counts by site before a thread's open forward."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}


class Buffers:
    """Buffers for one forward, fp32, one per site; they only grow.

    `own`: for custom sites, the width (None: no buffer) and whether tokens come without rows.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], own: Mapping[str, tuple[int | None, bool]] | None = None
    ) -> None:
        self._modules, self._own = modules, own or {}
        self._room: dict[str, Tensor] = {}
        self._written: dict[str, Tensor] = {}  # number of writes, and the last one's rows and tokens
        self._forward = _Forward()
        self._lock = threading.Lock()
        self._open: dict[int | None, bool] = {}  # threads in a forward, and whether another overlapped

    def holds(self, site: str, hidden: Tensor) -> bool:
        """True if `keep` may be traced."""
        return site in self._room and hidden.dim() == 3 and hidden.shape[2] == self._room[site].shape[2]

    def begin(self) -> None:
        """Note that this thread is in a forward, watched or not."""
        with self._lock:
            alive = {thread.ident for thread in threading.enumerate()}
            open_now = {thread for thread in self._open if thread in alive} | {threading.get_ident()}
            self._open = dict.fromkeys(open_now, len(open_now) > 1)

    def make_room(self, shape: tuple[int, ...], width: int) -> None:
        """Begin a forward of `shape` (rows, tokens).

        Tokens are rounded up to a power of two: a new buffer recompiles the graph.
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
                with torch.inference_mode(False):  # else it is not writable outside of that mode
                    self._room[site] = torch.zeros(size, dtype=torch.float32, device=device)
                    self._written.setdefault(site, torch.zeros(3, dtype=torch.int64, device=device))
                for tensor in (self._room[site], self._written[site]):
                    keep_address(tensor)
            self._forward.before[site] = int(self._written[site][0])

    def keep(self, site: str, hidden: Tensor) -> None:
        """Copy `[B, T, D]`; traceable."""
        self._room[site][: hidden.shape[0], : hidden.shape[1]].copy_(hidden.detach())
        written = self._written[site]
        written[0].add_(1)
        written[1].fill_(hidden.shape[0])
        written[2].fill_(hidden.shape[1])

    def written(self) -> list[tuple[str, Tensor]]:
        """End this thread's forward; return copies of its hidden states by site.

        Raises `AlignmentError` if another thread's forward overlapped or a site ran twice.
        """
        copies = []
        for site, count in self._forward.before.items():
            now, n_rows, n_tokens = self._written[site].tolist()
            if now != count:
                copies.append((site, now - count, self._room[site][:n_rows, :n_tokens].clone()))
        shared = self.abandon()  # after the copies: the next forward may write
        for site, n_times, _ in copies:
            if shared:
                raise AlignmentError(
                    f"threads ran a compiled model at once, and both wrote to the buffer of {site}: whose states"
                    " are there is unknown. Generate in one thread at a time"
                )
            if n_times != 1:
                raise AlignmentError(
                    f"{site} was run {n_times} times in one compiled call, and only its last states are there:"
                    " whose they are is unknown. Compile the layers, or a module that runs once"
                )
        return [(site, states) for site, _, states in copies]

    def abandon(self) -> bool:
        """End this thread's forward; return whether another overlapped."""
        self._forward.before = {}
        if not self._open:  # no compiled code
            return False
        with self._lock:
            return self._open.pop(threading.get_ident(), False)


class Bracket:
    """Opens and closes forwards around compiled calls, in place of hooks."""

    def __init__(self, before: Callable[..., None], after: Callable[..., None], failed: Callable[[], object]) -> None:
        self._before, self._after, self._failed = before, after, failed
        self._thread = threading.local()
        self._n_open = 0
        self._lock = threading.Lock()
        self.tracing = False  # a bool: graphs recompile when it changes

    @property
    def is_open(self) -> bool:
        """True inside a bracket of this thread."""
        return bool(getattr(self._thread, "open", False))

    def unless(self, hook: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that does nothing inside a bracket, and breaks other graphs."""
        # A partial, so that copying or pickling the model finds the hook's owner.
        return partial(self._unless, hook, torch.compiler.disable(hook, reason=_NO_WHOLE_GRAPH))

    def _unless(self, hook: Callable[..., None], disabled: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # is_compiling is also true while another thread compiles
            if not self.tracing:
                disabled(*args, **kwargs)
        elif not self.is_open:
            hook(*args, **kwargs)

    def shadow(self, stack: ExitStack, owner: Owner, model: Any, decoder: nn.Module) -> None:
        """Patch the compiled calls of model and decoder with brackets until `stack` closes.

        These are the calls that generate compiles, those of `module.compile()`, and a compiled `forward`.
        """
        names = {module: list(inspect.signature(module.forward).parameters) for module in (model, decoder)}

        def around(module: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() or self.is_open:
                return original(*args, **kwargs)
            arguments = {**dict(zip(names[module], args, strict=False)), **kwargs}
            if module is not decoder and is_encoder_decoder(model):
                arguments = _of_decoder(arguments)
            ids = arguments.get("input_ids")
            if (isinstance(ids, Tensor) and ids.dim() != 2) or (ids is None and arguments.get("inputs_embeds") is None):
                # The decoder's hooks see these inputs outside of the graph.
                return original(*args, **kwargs)
            self._thread.open = True
            try:
                self._before(decoder, (), arguments)
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

        patch_compiled_call(stack, owner, model, compiled_call)
        for module, name in compiled_parts(model):
            # A compiled forward of the decoder runs inside its hooks.
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


def _of_decoder(arguments: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {name.removeprefix("decoder_"): value for name, value in arguments.items() if name.startswith("decoder_")}
    return {
        **renamed,
        "cache": cache_among(arguments),
        "cache_position": arguments.get("cache_position"),
    }
