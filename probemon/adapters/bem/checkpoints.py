"""Gradient checkpointing of the host: the backward pass runs its layers again, with the codes of their forward.

    checkpoints = Checkpoints(layers, run, read)
    checkpoints.follow(forward)               # before the layers of a forward
    hidden = checkpoints.with_gradients(forward, hidden)             # at the layer that the controller reads
    checkpoints.leave()

The controller is run once, outside of what is run again, and its codes are kept with their forward. A checkpoint that
is not reentrant keeps the graph of the forward, and its gradients reach the codes by that. A reentrant one makes a
graph for each layer alone. There the codes are leaves, and the gradients that end in them are handed on where the
controller read: the backward pass comes to that place after all layers that took codes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.forwards import Forward
from probemon.errors import BemError
from probemon.host.internals import checkpoint_function, set_checkpoint_function

# call(forward, by_leaf, what, args): runs `what(*args)` as a part of `forward`.
Run = Callable[[Forward, bool, Callable[..., Any], tuple[Any, ...]], Any]


class Checkpoints:
    """What stands before the checkpoint function of each layer of a host, from the first forward that needs it.

    `run` runs what is run again. `read(hidden)`: runs the controller on what the first of `layers` is given; these are
    the layers from the one that is read on. Some versions of transformers run that layer's hooks within its checkpoint.
    """

    def __init__(self, layers: Sequence[nn.Module], run: Run, read: Callable[[Tensor], Tensor]) -> None:
        self._layers, self.run, self._read = list(layers), run, read
        self._shadowed: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def used(self, decoder: nn.Module) -> bool:
        """Whether a forward that begins now is checkpointed. Raises `BemError` where layers cannot be followed."""
        modules = [*self._layers, decoder]
        if not decoder.training or not any(getattr(module, "gradient_checkpointing", False) for module in modules):
            return False
        if any(checkpoint_function(layer) is None for layer in self._layers):
            raise BemError(
                "gradient checkpointing runs the host's layers again outside of its forward, and this host's layers "
                "have no checkpoint function by which codes could be followed: disable it on the host"
            )
        return True

    def follow(self, forward: Forward) -> None:
        """Bind what the layers of this forward run again to it."""
        for layer in self._layers:
            bound = next((one for one in _chain(layer) if one.owner is self), None)
            if bound is None:
                function = checkpoint_function(layer)
                assert function is not None
                bound = _Bound(self, function, self._read if layer is self._layers[0] else None)
                set_checkpoint_function(layer, bound)
                self._shadowed.add(layer)
            bound.forward = forward

    def leave(self) -> None:
        """Take what was put before the layers' own functions away again."""
        for layer in self._shadowed:
            above: _Bound | None = None
            for bound in _chain(layer):
                if bound.owner is not self:
                    above = bound
                elif above is None:
                    set_checkpoint_function(layer, bound.function)
                else:  # of another adapter on this host
                    above.function = bound.function
        self._shadowed.clear()

    @staticmethod
    def with_gradients(forward: Forward, hidden: Tensor) -> Tensor:
        """Return the same hidden states, by which gradients that ended in leaves reach the controller."""
        assert forward.applied is not None
        result: Tensor = _Handover.apply(hidden, forward, tuple(forward.applied), *forward.applied.values())
        return result


class _Bound:
    """A layer's checkpoint function, for the layers of one adapter's newest `forward`."""

    forward: Forward

    def __init__(
        self, owner: Checkpoints, function: Callable[..., Any], read: Callable[[Tensor], Tensor] | None
    ) -> None:
        self.owner, self.function, self._read = owner, function, read

    def __call__(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if self._read is not None and forward.applied is None and not forward.off:
            args = (self._read(args[0]), *args[1:])
        return self.function(_Again(what, forward, self.owner.run), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BemError("a host that is trained with an adapter on it cannot be copied: detach first")


def _chain(layer: nn.Module) -> Iterator[_Bound]:
    """What stands before a layer's own function, the outermost first."""
    function = checkpoint_function(layer)
    while isinstance(function, _Bound):
        yield function
        function = function.function


class _Again:
    """A part of a forward, which is run now and in the backward pass again."""

    def __init__(self, what: Callable[..., Any], forward: Forward, run: Run) -> None:
        self._what, self._forward, self._run = what, forward, run
        self._gradients, self._ran, self._reentrant = torch.is_grad_enabled(), False, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._ran = self._ran, True
        if not again:  # a reentrant checkpoint runs its forward without a graph
            self._reentrant = self._gradients and not torch.is_grad_enabled()
        return self._run(self._forward, again and self._reentrant, partial(self._what, **kwargs), args)


class _Handover(torch.autograd.Function):
    """The identity of hidden states, whose backward gives codes the gradients that their leaves have."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: Forward, keys: tuple[str, ...], *codes: Tensor) -> Tensor:
        ctx.of_forward, ctx.keys = forward, keys
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override,unused-ignore]
        return (grad, None, None, *(ctx.of_forward.take_gradient(key) for key in ctx.keys))
