"""A short generation that shows whether the server still sees its model."""

from __future__ import annotations

from probemon.errors import Blind
from probemon.monitor.canary import Canary, differ
from probemon.monitor.check import FAILED, OK, Check
from probemon.monitor.health import Health
from probemon.ops.server.served import Served

_REMEDY = "Start the server again; probemon doctor says more of the model and the pack."


class ServedCanary:
    """Compares later runs with the first. Raises `Blind`."""

    def __init__(self, served: Served) -> None:
        self._canary = Canary(served.manager, served.model, served.tokenizer, **served.padding)
        self._first = self._canary.sing().scores

    def look(self) -> Health:
        """Return the health of a canary run, scores included."""
        try:
            song = self._canary.sing()
        except Blind as error:
            return Health((Check("canary", FAILED, str(error), _REMEDY),))
        difference = differ(song.scores, self._first)
        if difference:
            check = Check("canary", FAILED, f"{difference} than when the server began", _REMEDY)
        else:
            check = Check("canary", OK, "the canary's scores are those of the server's beginning")
        return song.health.with_checks([check])
