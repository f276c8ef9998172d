"""Gradient checkpointing of the model: layers run again with the codes of their forward.

The controller runs once, outside of checkpoints. Non-reentrant ones keep the graph, through which gradients reach the
codes. In reentrant ones codes are leaves. Their gradients are passed on where the controller reads, which the backward
pass reaches last. A layer's parameters that were frozen in the forward are frozen when it runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from probemon.adapters.bem.forwards import Forward, frozen
from probemon.errors import BemError
from probemon.host.internals import checkpoint_function, set_checkpoint_function

# run(forward, by_leaf, what, args) calls `what(*args)` within `forward`.
Run = Callable[[Forward, bool, Callable[..., Any], tuple[Any, ...]], Any]


class Checkpoints:
    """Wraps checkpoint functions of layers.

        checkpoints = Checkpoints(layers, read_layer, run, read)
        checkpoints.follow(forward)               # before its layers
        hidden = checkpoints.with_gradients(forward, hidden)             # at the layer that is read
        checkpoints.leave()

    `run`: runs a layer again.
    `read(hidden)`: runs the controller, if hooks of layer `read_layer` run within its checkpoint.
    """

    def __init__(
        self, layers: Iterable[nn.Module], read_layer: int, run: Run, read: Callable[[Tensor], Tensor]
    ) -> None:
        self._layers, self._read_layer, self.run, self._read = list(layers), read_layer, run, read
        self._patched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def used(self, decoder: nn.Module) -> bool:
        """True if a forward is checkpointed. Raises `BemError` without a checkpoint function."""
        modules = [*self._layers, decoder]
        if not decoder.training or not any(getattr(module, "gradient_checkpointing", False) for module in modules):
            return False
        if any(checkpoint_function(layer) is None for layer in self._layers):
            raise BemError(
                "gradient checkpointing runs layers again outside of the forward, and this model's layers have no "
                "checkpoint function through which codes could be passed: disable it on the model"
            )
        return True

    def follow(self, forward: Forward) -> None:
        """Bind the layers' checkpoint functions to this forward."""
        for number, layer in enumerate(self._layers):
            bound = next((one for one in _chain(layer) if one.owner is self), None)
            if bound is None:
                function = checkpoint_function(layer)
                assert function is not None
                bound = _Bound(self, layer, function, self._read if number == self._read_layer else None)
                set_checkpoint_function(layer, bound)
                self._patched.add(layer)
            bound.forward = forward

    def leave(self) -> None:
        """Restore the checkpoint functions."""
        for layer in self._patched:
            above: _Bound | None = None
            for bound in _chain(layer):
                if bound.owner is not self:
                    above = bound
                elif above is None:
                    set_checkpoint_function(layer, bound.function)
                else:  # of another adapter
                    above.function = bound.function
        self._patched.clear()

    @staticmethod
    def with_gradients(forward: Forward, hidden: Tensor) -> Tensor:
        """Return `hidden`, through which gradients of leaves reach the controller."""
        assert forward.applied is not None
        result: Tensor = _Handover.apply(hidden, forward, tuple(forward.applied), *forward.applied.values())
        return result


class _Bound:
    """A layer's checkpoint function, bound to the newest `forward`."""

    forward: Forward

    def __init__(
        self,
        owner: Checkpoints,
        layer: nn.Module,
        function: Callable[..., Any],
        read: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.owner, self.function, self._read = owner, function, read
        self._layer = weakref.ref(layer)

    def __call__(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if self._read is not None and forward.applied is None and not forward.off:
            args = (self._read(args[0]), *args[1:])
        layer = self._layer()
        assert layer is not None
        still = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
        return self.function(_Again(what, forward, self.owner.run, still), *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BemError("a model that is trained with an adapter on it cannot be copied: detach first")


def _chain(layer: nn.Module) -> Iterator[_Bound]:
    function = checkpoint_function(layer)
    while isinstance(function, _Bound):
        yield function
        function = function.function


class _Again:
    """Part of a forward, run now and in the backward pass; `still`: its parameters without a gradient."""

    def __init__(self, what: Callable[..., Any], forward: Forward, run: Run, still: Sequence[nn.Parameter]) -> None:
        self._what, self._forward, self._run, self._still = what, forward, run, still
        self._gradients, self._ran, self._reentrant = torch.is_grad_enabled(), False, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_rerun, self._ran = self._ran, True
        if not is_rerun:  # a reentrant checkpoint runs its forward without a graph
            self._reentrant = self._gradients and not torch.is_grad_enabled()
        with frozen(self._still if is_rerun else ()):
            return self._run(self._forward, is_rerun and self._reentrant, partial(self._what, **kwargs), args)


class _Handover(torch.autograd.Function):
    """Identity; its backward returns the gradients of leaves."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: Forward, keys: tuple[str, ...], *codes: Tensor) -> Tensor:
        ctx.of_forward, ctx.keys = forward, keys
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override,unused-ignore]
        return (grad, None, None, *(ctx.of_forward.take_gradient(key) for key in ctx.keys))
