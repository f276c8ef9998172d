"""KeepStates: writes the hidden states of what a run watches to a folder, attributed to tokens as scores are.

    with manager.attach(model, tokenizer, followers=[KeepStates("states/", ["resid_post.10"])]) as run:
        out = model.generate(**inputs)
    kept = read_states("states/")
    kept["resid_post.10"], kept["row"], kept["position"]       # [N, D] in the model's dtype, [N], [N]

`run.keep_states("states/")` does the same for the sites of the packs. The folder has safetensors files of bounded size,
each complete once it has its name, and `kept_states.json`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from probemon.core.probes import as_site
from probemon.core.scores import PHASES, Scores
from probemon.errors import ConfigError
from probemon.host.site import Site
from probemon.monitor.check import OK, WARNING, Check
from probemon.monitor.followers import Batch, Follower
from probemon.tracking.generation import States
from probemon.util.checks import check_choice, check_count
from probemon.util.files import write_text_atomically

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

INDEX = "kept_states.json"
_FILE_BYTES = 64 << 20  # of states that wait in memory
_BEAMS = "they are of beams, whose rows are known only at the end"
COLUMNS = ("generation", "row", "position", "token_id", "phase")


class KeepStates(Follower):
    """Follows one run. Raises `ConfigError` for a folder that has kept states.

    - `to`: folder, made if missing
    - `sites`: such as "resid_post.10"; None: those of the packs
    - `phase`: "prompt" or "generated"; None: both
    - `max_bytes`: of states on disk; further tokens are left out and counted, and `run.health()` says so
    """

    kind = "keeping states"

    def __init__(
        self,
        to: str | os.PathLike[str],
        sites: Sequence[str] | None = None,
        *,
        phase: str | None = None,
        max_bytes: int = 4 << 30,
    ) -> None:
        self.folder = Path(to)
        self._sites = None if sites is None else [as_site(site) for site in sites]
        self._phase = None if phase is None else check_choice("phase", phase, PHASES)
        self._max_bytes = check_count("max_bytes", max_bytes, least=1)
        self.n_kept = self.n_left_out = self.n_bytes = 0
        self.why_left_out = ""
        # Until they are scored; a batch that is dropped takes its states along.
        self._pending: WeakKeyDictionary[Batch, dict[str, Tensor]] = WeakKeyDictionary()
        self._parts: list[tuple[Batch, dict[str, Tensor]]] = []
        self._waiting_bytes = self._n_files = 0
        self._dtypes: dict[str, str] = {}

    def attaching(self, run: MonitorRun) -> Sequence[str | Site]:
        """Ask for sites that the packs do not read."""
        own = list(run.manager.pack.sites)
        if self._sites is None:
            self._sites = own
        if not self._sites:
            raise ConfigError("sites is empty: give the sites whose states are kept, such as resid_post.10")
        return [site for site in self._sites if site not in own]

    def began(self, run: MonitorRun) -> None:
        """Make the folder. Raises `ConfigError` if it has states."""
        if (self.folder / INDEX).exists():
            raise ConfigError(f"{self.folder} has kept states: give another folder, or delete it")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_index(complete=False)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{self.folder} cannot be written ({why}): give another folder") from error

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Copy the states of tokens that will be scored."""
        if isinstance(hidden, str) or self._phase not in (None, PHASES[batch.placed.phase]):
            return
        if batch.placed.provisional:
            self._leave_out(len(batch.placed), _BEAMS)
            return
        assert self._sites is not None
        self._pending[batch] = {site: hidden[site].detach().to("cpu", copy=True) for site in self._sites}

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Keep them."""
        states = self._pending.pop(batch, None)
        if states is None:
            return
        n_bytes = sum(one.nbytes for one in states.values())
        if self.n_bytes + n_bytes > self._max_bytes:
            self._leave_out(len(batch.placed), f"{self.folder} has its most bytes (max_bytes={self._max_bytes:,})")
            return
        self.n_bytes, self.n_kept = self.n_bytes + n_bytes, self.n_kept + len(batch.placed)
        self._waiting_bytes += n_bytes
        self._parts.append((batch, states))
        if self._waiting_bytes >= _FILE_BYTES:
            self._write()

    def finish(self, failed: bool) -> None:
        """Write the rest."""
        self._write()
        self._write_index(complete=not failed)

    def check(self) -> Check:
        """Return how many tokens have states, and why others have none."""
        what = f"{self.n_kept:,} tokens in {self.folder}"
        if not self.n_left_out:
            return Check("kept states", OK, what)
        return Check(
            "kept states",
            WARNING,
            f"{what}; {self.n_left_out:,} left out: {self.why_left_out}",
            "give a larger max_bytes, or generate without beams",
        )

    # -- inside ----------------------------------------------------------------------------------

    def _leave_out(self, n: int, why: str) -> None:
        self.n_left_out += n
        self.why_left_out = self.why_left_out or why

    def _write(self) -> None:
        parts, self._parts, self._waiting_bytes = self._parts, [], 0
        if not parts:
            return
        numbers: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        for batch, _ in parts:
            tokens = batch.placed
            numbers["generation"].append(np.full(len(tokens), batch.recording.number))
            numbers["row"].append(tokens.rows)
            numbers["position"].append(tokens.columns - batch.recording.offset)
            numbers["token_id"].append(tokens.ids)
            numbers["phase"].append(np.full(len(tokens), tokens.phase))
        tensors = {name: torch.from_numpy(np.concatenate(values).astype(np.int64)) for name, values in numbers.items()}
        for site in parts[0][1]:
            tensors[site] = torch.cat([states[site] for _, states in parts])
            self._dtypes[site] = str(tensors[site].dtype).removeprefix("torch.")
        name = self.folder / f"states-{self._n_files:05}.safetensors"
        partial = name.with_suffix(".partial")
        save_file(tensors, partial)
        partial.replace(name)
        self._n_files += 1
        self._write_index(complete=False)

    def _write_index(self, *, complete: bool) -> None:
        index = {
            "kept_states": 1,
            "sites": self._sites,
            "dtypes": self._dtypes,
            "phase": self._phase,
            "n_files": self._n_files,
            "n_tokens": self.n_kept,
            "n_left_out": self.n_left_out,
            "why_left_out": self.why_left_out,
            "complete": complete,
        }
        write_text_atomically(self.folder / INDEX, json.dumps(index, indent=1) + "\n")


def read_states(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the tensors of a folder: `generation`, `row`, `position`, `token_id`, `phase` `[N]` int64 and by site
    `[N, D]`, in the order in which tokens were run. Raises `ConfigError`.
    """
    path = Path(folder)
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        files = [load_file(path / f"states-{i:05}.safetensors") for i in range(index["n_files"])]
    except FileNotFoundError as error:
        raise ConfigError(f"{path} has no kept states ({Path(str(error.filename)).name} is missing)") from error
    except Exception as error:
        raise ConfigError(f"{path} cannot be read as kept states: {error}") from error
    none = {name: torch.zeros(0, dtype=torch.int64) for name in COLUMNS}
    return {name: torch.cat([one[name] for one in files]) for name in files[0]} if files else none
