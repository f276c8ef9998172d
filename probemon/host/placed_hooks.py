"""PlacedHook: a hook of ours on a module, and whether it is still there and still sees what the host goes on with.

placed = PlacedHook.of("resid_post.15", module, handle)       # once everything is attached
placed.lost()                                                 # why it sees nothing any more, "" where it does
placed.doubt()                                                # what may make it see something else, "" where nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from probemon.host.internals import COMPILED_CALL, hook_of, hooks_after, own_methods

# Whose hooks change no output: ours, and those by which transformers collects hidden states.
_READERS = ("probemon.host.tap", "probemon.adapters.routing", "transformers.utils.output_capturing")


@dataclass(frozen=True)
class PlacedHook:
    """`methods`: what a call of the module went through when the hook was put there; `reads`: whether it reads what the
    module gives.
    """

    what: str
    module: nn.Module
    handle: RemovableHandle
    hook: Any
    methods: dict[str, Any]
    reads: bool

    @staticmethod
    def of(what: str, module: nn.Module, handle: RemovableHandle, *, reads: bool = False) -> PlacedHook:
        """Return a hook that is on a module; `what` names it."""
        return PlacedHook(what, module, handle, hook_of(module, handle), own_methods(module), reads)

    def lost(self) -> str:
        """Return why the hook does not run any more, "" where it does."""
        if hook_of(self.module, self.handle) is not self.hook:
            return f"our hook at {self.what} was removed"
        if own_methods(self.module)["_call_impl"] is not self.methods["_call_impl"]:
            return f"the call of {type(self.module).__name__} at {self.what} was replaced, so that no hook runs"
        return ""

    def doubt(self) -> str:
        """Return why it may see something else than before, or than the host goes on with, "" where nothing shows."""
        now, name = own_methods(self.module), type(self.module).__name__
        if now["forward"] is not self.methods["forward"]:
            return f"the forward of {name} at {self.what} was replaced"
        if now[COMPILED_CALL] is not self.methods[COMPILED_CALL]:
            return f"{name} at {self.what} was compiled"
        for hook in hooks_after(self.module, self.handle) if self.reads else ():
            whose = getattr(hook, "__module__", None) or type(hook).__name__
            if not whose.startswith(_READERS):
                return f"a hook of {whose} runs after ours at {self.what}, and what it changes we do not read"
        return ""
