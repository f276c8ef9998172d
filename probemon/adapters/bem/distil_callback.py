"""DistilCallback: a static LoRA every n steps of Hugging Face's Trainer.

    callback = DistilCallback(bem, batches, "loras/", every=500, keep=3)
    Trainer(model=Objective(bem), ..., callbacks=[callback]).train()
    callback.written[-1]                              # loras/step-500, for PEFT; with distilled.json

A folder appears complete or not at all. Training is the same, bit for bit.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.distil import StaticLora, distil, distil_trained
from probemon.adapters.bem.losses import Batch, check_learnable
from probemon.adapters.bem.saved import make_folder
from probemon.adapters.bem.training import TrainSettings, check_fit
from probemon.adapters.bem.twins import check_has_twin
from probemon.errors import ConfigError
from probemon.util.checks import check_count
from probemon.util.files import write_text_atomically

_OURS = re.compile(r"step-(\d+)")


class DistilCallback(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """Distils `bem` on `batches` into `folder/step-N`, every `every` steps and at the end; keeps the newest `keep`.

    `settings`: of `distil_trained`; None takes `distil`, which is quick.
    `how`: as of either.

    Only the first process writes. Raises `ConfigError`, at once if possible.
    """

    def __init__(
        self,
        bem: Bem,
        batches: Sequence[Batch],
        folder: str | Path,
        *,
        every: int,
        keep: int = 3,
        settings: TrainSettings | None = None,
        **how: Any,
    ) -> None:
        check_learnable(bem)
        check_count("every", every, least=1, remedy="give 1 or more steps")
        check_count("keep", keep, least=1, remedy="give 1 or more")
        check_has_twin(bem.config)
        check_fit(batches, TrainSettings(n_steps=1) if settings is None else settings)
        distiller = distil if settings is None else distil_trained
        options = sorted(set(inspect.signature(distiller).parameters) - {"bem", "batches", "settings"})
        if unknown := sorted(set(how) - set(options)):
            raise ConfigError(
                f"{unknown[0]!r} is not a setting of {distiller.__name__}: it takes {', '.join(options)}"
                + ("; those of a trained LoRA need settings=TrainSettings(...)" if settings is None else "")
            )
        self.bem, self.batches, self.folder = bem, batches, Path(folder)
        self.every, self.keep, self.settings, self.how = every, keep, settings, how

    @property
    def written(self) -> list[Path]:
        """All folders of any training, oldest first."""
        if not self.folder.is_dir():
            return []
        ours = [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name) and path.is_dir()]
        # By time: a restarted training writes smaller steps.
        return sorted(ours, key=lambda path: (path.stat().st_mtime_ns, int(path.name.removeprefix("step-"))))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self._write(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every:
            self._write(state)

    def _write(self, state: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self.settings is None:
            lora: StaticLora = distil(self.bem, self.batches, **self.how)
        else:
            lora, _ = distil_trained(self.bem, self.batches, self.settings, **self.how)
        step = int(state.global_step)
        make_folder(self.folder)
        target = self.folder / f"step-{step}"
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=self.folder))
        try:
            lora.save(temporary)
            record = {"step": step, "method": lora.method, "error": lora.error, "rank": lora.rank, "start": lora.start}
            write_text_atomically(temporary / "distilled.json", json.dumps(record, indent=2) + "\n")
            temporary.chmod(0o755)
            if target.exists():  # from a training that was resumed
                shutil.rmtree(target)
            os.replace(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for old in self.written[: -self.keep]:
            shutil.rmtree(old)
