"""Gradient checkpointing of the model: layers run again with the codes of their forward.

The controller runs once, outside of checkpoints. These keep the graph, through which gradients reach the codes:
reentrant ones, which would not, are run as the others. A layer's parameters that were frozen in the forward are frozen
when it runs again.
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

# run(forward, what, args) calls `what(*args)` within `forward`.
Run = Callable[[Forward, Callable[..., Any], tuple[Any, ...]], Any]


class Checkpoints:
    """Wraps checkpoint functions of layers.

        checkpoints = Checkpoints(layers, read_layer, run, read)
        checkpoints.follow(forward)               # before its layers
        checkpoints.leave()

    `run`: runs a layer again.
    `read(hidden)`: runs the controller, if hooks of layer `read_layer` run within its checkpoint.
    """

    def __init__(self, layers: Iterable[nn.Module], read_layer: int, run: Run, read: Callable[[Tensor], None]) -> None:
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


class _Bound:
    """A layer's checkpoint function, bound to the newest `forward`."""

    forward: Forward

    def __init__(
        self,
        owner: Checkpoints,
        layer: nn.Module,
        function: Callable[..., Any],
        read: Callable[[Tensor], None] | None,
    ) -> None:
        self.owner, self.function, self._read = owner, function, read
        self._layer = weakref.ref(layer)

    def __call__(self, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        forward = self.forward
        if self._read is not None and forward.applied is None and not forward.off:
            self._read(args[0])
        layer = self._layer()
        assert layer is not None
        still = [parameter for parameter in layer.parameters() if not parameter.requires_grad]
        if isinstance(self.function, partial):  # transformers makes it of torch's checkpoint
            kwargs = {**kwargs, "use_reentrant": False}
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
        self._gradients, self._ran = torch.is_grad_enabled(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() != self._gradients:
            raise BemError(
                "this checkpoint runs a layer without a graph, so the adapter would get no gradient: enable it by"
                " gradient_checkpointing_enable(), or give use_reentrant=False"
            )
        is_rerun, self._ran = self._ran, True
        with frozen(self._still if is_rerun else ()):
            return self._run(self._forward, partial(self._what, **kwargs), args)
