"""A routed adapter as a method of PEFT. Importing this module registers it.

    from peft import PeftModel, get_peft_model
    from probemon.adapters.bem.peft_tuner import BemPeftConfig

    tuned = get_peft_model(model, BemPeftConfig(rank=8, sites=("o", "down"), task_type="CAUSAL_LM"))
    tuned.save_pretrained("adapter/")
    tuned = PeftModel.from_pretrained(model, "adapter/")
    tuned.bem                                               # the `Bem` that steers

All adapters are attached and one steers. They are never added or merged.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.saved import (
    STATED,
    check_complete,
    check_fit,
    check_kept,
    check_tensors,
    read_settings,
    settings_tensor,
)
from probemon.errors import BemError, BemFileError, ConfigError, MissingExtra, UnsupportedModel
from probemon.host.internals import add_peft_type

try:
    from peft import PeftConfig
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.peft_types import register_peft_method

    if not hasattr(BaseTuner, "_remap_adapter_state_dict_for_load"):  # defines the content of files
        raise ImportError("an older peft")
except ImportError as missing:
    raise MissingExtra("a routed adapter in PEFT needs peft 0.21 or newer: pip install 'probemon[bem]'") from missing

TYPE = add_peft_type("BEM")
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
_SETTINGS = [
    (field.name, field.type, dataclasses.field(default=field.default)) for field in dataclasses.fields(BemConfig)
]
_Settings: Any = dataclasses.make_dataclass("_Settings", _SETTINGS, bases=(PeftConfig,))


@dataclass
class BemPeftConfig(_Settings):  # type: ignore[misc]
    """Settings of `BemConfig`, and PEFT's own. Raises as `BemConfig`.

    `impl`: as in `attach_bem`; not saved.
    """

    impl: str = "reference"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = TYPE
        for name, value in dataclasses.asdict(self.bem_config()).items():
            setattr(self, name, value)

    def bem_config(self) -> BemConfig:
        """Return the adapter's own settings."""
        return BemConfig.from_dict({name: getattr(self, name) for name, _, _ in _SETTINGS})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `adapter_config.json`."""
        return {name: value for name, value in super().to_dict().items() if name != "impl"}

    @classmethod
    def check_kwargs(cls, **kwargs: Any) -> dict[str, Any]:
        """Return a file's settings. Raises `BemFileError` if one is missing or unknown."""
        check_complete("adapter_config.json", kwargs)
        unknown = sorted(set(kwargs) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise BemFileError(
                f"adapter_config.json has settings that are not known here ({', '.join(unknown)}): upgrade probemon "
                "and peft"
            )
        return kwargs


class BemAdapters(nn.Module, BaseTunerLayer):  # type: ignore[misc]
    """A model's adapters by name; one layer to PEFT."""

    adapter_layer_names = ("named",)

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()
        self._active_adapter: Any = []
        self.merged_adapters: list[str] = []

    @property
    def active(self) -> Bem | None:
        """The adapter that steers, or would if enabled."""
        return self.by_name()[self.active_adapters[0]] if self.active_adapters else None

    def by_name(self) -> dict[str, Bem]:
        """Return the adapters by name."""
        return {name: bem for name, bem in self.named.items() if isinstance(bem, Bem)}

    def enable_adapters(self, enabled: bool) -> None:
        """Let the active adapter steer, or not."""
        self._disable_adapters = not enabled
        if self.active is not None:
            self.active.enabled = enabled

    def set_adapter(self, adapter_names: str | Sequence[str], inference_mode: bool = False) -> None:
        """Let one adapter steer instead of another."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        if len(names) > 1:
            raise BemError(
                f"adapters {', '.join(names)} cannot steer together, since each would read what the others wrote: set "
                "one of them"
            )
        for name, bem in self.by_name().items():
            if name not in names:
                bem.enabled = False
        super().set_adapter(names, inference_mode=inference_mode)
        if self.active is not None:
            self.active.enabled = not self._disable_adapters

    def delete_adapter(self, adapter_name: str) -> None:
        """Detach an adapter and forget it."""
        self.by_name()[adapter_name].detach()
        super().delete_adapter(adapter_name)


class BemTuner(BaseTuner):  # type: ignore[misc]
    """PEFT's wrapper of a model."""

    prefix = "bem_"
    tuner_layer_cls = BemAdapters
    uses_shared_state = True

    @property
    def bem(self) -> Bem:
        """The active adapter. Raises `BemError` if there is none."""
        active = self.bem_adapters.active
        if active is None:
            raise BemError("no adapter is active: add or set one")
        return active

    # -- adapters by name ------------------------------------------------------------------------

    def _pre_injection_hook(self, model: nn.Module, config: Any, adapter_name: str) -> None:
        self.bem_adapters = BemAdapters()

    def inject_adapter(self, model: nn.Module, adapter_name: str, *_: Any, **how: Any) -> None:
        """Make an adapter; the first steers at once. Freezes the model. Raises as `attach_bem`."""
        config: Any = self.peft_config[adapter_name]
        adapters = self.bem_adapters
        if config.task_type not in _TASKS:
            raise UnsupportedModel(
                f"task_type is {config.task_type}, whose head would have to learn too: give "
                f"{' or '.join(str(task) for task in _TASKS[1:])}, or None"
            )
        if nn.Linear(1, 1).weight.is_meta or how.get("low_cpu_mem_usage"):
            raise ConfigError("low_cpu_mem_usage=True makes empty weights, and an adapter's are few: leave it out")
        bem = Bem(model, config.bem_config(), impl=config.impl)
        reserved = {part for key in bem.state_dict() for part in key.split(".")} | {"named", "bem_adapters", STATED}
        if "." in adapter_name or not adapter_name or adapter_name in reserved:
            raise ConfigError(
                f"an adapter cannot be called {adapter_name!r}, which has a dot or is a part of the names of its "
                "tensors: give another name"
            )
        first = not adapters.named
        bem.enabled = first
        bem.attach()  # raises if another adapter steers
        adapters.named[adapter_name] = bem
        if first:
            self._learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
            model.requires_grad_(False)
            adapters.set_adapter(adapter_name, inference_mode=config.inference_mode)
            self.active_adapter = adapter_name
        else:
            bem.requires_grad_(False)

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Let one adapter steer, and learn unless `inference_mode`."""
        self.bem_adapters.set_adapter(adapter_name, inference_mode=inference_mode)
        self.active_adapter = adapter_name

    def delete_adapter(self, adapter_name: str) -> None:
        """Detach an adapter and forget it; if it was active, the first other one steers."""
        if adapter_name not in self.peft_config:
            raise ConfigError(f"there is no adapter {adapter_name!r}: there are {', '.join(self.peft_config)}")
        self.bem_adapters.delete_adapter(adapter_name)
        del self.peft_config[adapter_name]
        self.active_adapter = list(self.bem_adapters.active_adapters)

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Let adapters learn, or not."""
        self.bem_adapters.set_requires_grad(adapter_names, requires_grad)

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        self.bem_adapters.enable_adapters(enabled)

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        if kwargs.get("adapter_names") is not None:
            raise BemError(
                "adapter_names would give each row its own adapter, and one adapter steers all rows of a forward:"
                " run the rows of each by themselves, after set_adapter"
            )
        yield

    # -- off, and never merged -------------------------------------------------------------------

    # For `unload`: the model's parameters that learned before.
    _learned: list[nn.Parameter]

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        if merge:
            self.merge_adapter()
        for bem in self.bem_adapters.by_name().values():
            bem.detach()
        for parameter in self._learned:
            parameter.requires_grad_(True)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config
        return self.model

    def merge_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise `BemError`: an update differs from token to token."""
        raise BemError(
            "a routed adapter's update differs from token to token, so no weight can hold it: make a static LoRA of it "
            "(probemon.adapters.bem.distil) and merge that; unload() gives the model back as it was"
        )

    def unmerge_adapter(self) -> None:
        """Do nothing."""

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise BemError("a routed adapter replaces no module of its model: use get_peft_model")

    # -- files -----------------------------------------------------------------------------------

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: Any,
        config: Any,
        adapter_name: str,
        state_dict: Mapping[str, Any],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Any]:
        bem, within = _adapter_of(model, adapter_name), f"bem_adapters.named.{adapter_name}."
        tensors = {key: value for key, value in state_dict.items() if within in key}
        check_kept({key.rpartition(within)[2]: value for key, value in tensors.items()})
        if any(tensor.dtype == torch.int8 for tensor in tensors.values()):
            raise BemError("U and V in int8 are not saved by PEFT: save them by bem.save_pretrained(folder)")
        start = next(iter(tensors), within).partition(within)[0]
        return {**tensors, f"{start}{within}{STATED}": settings_tensor(bem.config, bem.host, bem.sites)}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key.replace(f"bem_adapters.named.{adapter_name}.", "bem_adapters.", 1)

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        bem, file_prefix, where = _adapter_of(model, adapter_name), "bem_adapters.", "the adapter's file"
        tensors = {key.rpartition(file_prefix)[2]: value for key, value in state_dict.items()}
        stored_settings = tensors.pop(STATED, None)
        if stored_settings is None or stored_settings.dtype != torch.uint8:
            raise BemFileError(f"{where} does not state its settings: give one that save_pretrained wrote")
        settings = read_settings(where, bytes(stored_settings.cpu().flatten().tolist()))
        if settings["config"] != json.loads(json.dumps(dataclasses.asdict(bem.config))):
            raise BemFileError(
                f"{where} was saved with other settings than adapter_config.json has now: copy the folder again; to "
                "change a setting, make an adapter with it and save that"
            )
        check_fit(where, settings["host"], bem.config, bem.host, strict=False)
        check_tensors(where, bem.state_dict(), tensors)
        check_kept(tensors)
        for name, parameter in bem.named_parameters():  # each keeps its saved dtype
            parameter.data = parameter.data.to(tensors[name].dtype)
        start = "" if isinstance(model, cls) else "base_model."
        return {f"{start}bem_adapters.named.{adapter_name}.{name}": tensor for name, tensor in tensors.items()}


def _adapter_of(model: Any, adapter_name: str) -> Bem:
    tuner = model if isinstance(model, BemTuner) else model.base_model
    adapters: dict[str, Bem] = tuner.bem_adapters.by_name()
    return adapters[adapter_name]


register_peft_method(name="bem", config_cls=BemPeftConfig, model_cls=BemTuner, prefix=BemTuner.prefix)
