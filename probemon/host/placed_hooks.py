"""PlacedHook: an installed hook, and whether it still works.

placed = PlacedHook.of("resid_post.15", module, handle)
placed.lost()                                                 # why it no longer runs, or ""
placed.doubt()                                                # why it may read other values, or ""
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from probemon.host.internals import COMPILED_CALL, hook_of, hooks_after, own_methods

# Modules whose hooks change no output.
_READERS = ("probemon.host.tap", "probemon.adapters.routing", "transformers.utils.output_capturing")


@dataclass(frozen=True)
class PlacedHook:
    """`methods`: the module's at installation; `reads`: the output is read."""

    what: str
    module: nn.Module
    handle: RemovableHandle
    hook: Any
    methods: dict[str, Any]
    reads: bool

    @staticmethod
    def of(what: str, module: nn.Module, handle: RemovableHandle, *, reads: bool = False) -> PlacedHook:
        """`what` names the place."""
        return PlacedHook(what, module, handle, hook_of(module, handle), own_methods(module), reads)

    def lost(self) -> str:
        """Return why the hook no longer runs, or ""."""
        if hook_of(self.module, self.handle) is not self.hook:
            return f"our hook at {self.what} was removed"
        if own_methods(self.module)["_call_impl"] is not self.methods["_call_impl"]:
            return f"the call of {type(self.module).__name__} at {self.what} was replaced, so that no hook runs"
        return ""

    def doubt(self) -> str:
        """Return why it may not see the values that the model goes on with, or ""."""
        now, name = own_methods(self.module), type(self.module).__name__
        if now["forward"] is not self.methods["forward"]:
            return f"the forward of {name} at {self.what} was replaced"
        if now[COMPILED_CALL] is not self.methods[COMPILED_CALL]:
            return f"{name} at {self.what} was compiled"
        for hook in hooks_after(self.module, self.handle) if self.reads else ():
            source = getattr(hook, "__module__", None) or type(hook).__name__
            if not source.startswith(_READERS):
                return f"a hook of {source} runs after ours at {self.what}, and its changes are not read"
        return ""
