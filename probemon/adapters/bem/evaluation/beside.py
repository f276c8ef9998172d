"""A LoRA of PEFT beside an adapter: at its sites, with as many trainable numbers, learned from the same batches.

with lora_beside(model, names, rank=9, scale=2.0) as lora:      # Hu and others 2021
    fit(lora.parameters(), ..., batches, settings)
    by_document(model, batches, documents).loss
lora.static().save("lora/")
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.distil import StaticLora, module_name
from probemon.adapters.bem.losses import (
    LossWeights,
    as_batch,
    forward_inputs,
    kl_to_base,
    mode,
    next_labels,
    real_tokens,
)
from probemon.errors import MissingExtra, UnsupportedModel

_NAME = "beside"


class LoraBeside(nn.Module):
    """The LoRA's losses as a model: `forward` gives `loss` and `logits`; only the factors are its parameters.

    The weights of `lm` and `kl` are an adapter's.
    """

    def __init__(self, peft_model: Any, rank: int, alpha: float, weights: LossWeights) -> None:
        super().__init__()
        self.rank, self.alpha, self.weights = rank, alpha, weights
        self._peft = [peft_model]  # in a list: no submodule
        self.factors = nn.ParameterDict(
            {name.replace(".", "/"): one for name, one in peft_model.named_parameters() if f".{_NAME}." in name}
        )

    @property
    def n_trainable(self) -> int:
        """Number of trainable numbers."""
        return sum(factor.numel() for factor in self.factors.values())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the weighted sum of the cross-entropy of labels and of KL(with the LoRA || bare model)."""
        [peft_model] = self._peft
        batch, host = as_batch(input_ids, attention_mask, labels, position_ids), peft_model.get_base_model()
        inputs = forward_inputs(host, batch)
        logits: Tensor = host(**inputs, use_cache=False).logits
        targets = next_labels(host, batch).flatten()
        loss = self.weights.lm * nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets, ignore_index=-100
        )
        if self.weights.kl:
            with torch.no_grad(), peft_model.disable_adapter(), mode(host, training=False):
                bare = host(**inputs, use_cache=False).logits
            loss = loss + self.weights.kl * kl_to_base(logits, bare, real_tokens(batch))
        return {"loss": loss, "logits": logits}

    def save(self, folder: Path) -> None:
        """Write it in PEFT's format."""
        host = self._peft[0].get_base_model()
        self.static(getattr(host, "name_or_path", None) or None).save(folder)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        saved = load_file(folder / "adapter_model.safetensors")
        with torch.no_grad():
            for key, factor in self.factors.items():
                factor.copy_(saved[key.replace("/", ".").replace(f".{_NAME}.", ".")])

    def train(self, mode: bool = True) -> LoraBeside:
        """Set its mode, and the model's."""
        super().train(mode)
        self._peft[0].train(mode)
        return self

    def static(self, base_model: str | None = None) -> StaticLora:
        """Return the LoRA as it is now."""
        pairs: dict[str, dict[str, Tensor]] = {}
        for key, factor in self.factors.items():
            name, _, side = key.replace("/", ".").removeprefix("base_model.model.").rpartition(".lora_")
            pairs.setdefault(name, {})[side[0]] = factor.detach().cpu()
        factors = {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}
        return StaticLora(self.rank, self.alpha, factors, "trained", None, base_model)


@dataclass(frozen=True)
class Beside:
    """Where a LoRA is beside an adapter, and its size.

    - `names`: of modules
    - `rank`: whose LoRA is nearest to the adapter's trainable numbers
    - `why_not`: the reason if a LoRA cannot be at these sites, else ""
    """

    names: tuple[str, ...]
    rank: int
    scale: float
    seed: int
    why_not: str = ""

    @classmethod
    def of(cls, bem: Bem, seed: int) -> Beside:
        """Return that of an attached adapter."""
        n_trainable = sum(parameter.numel() for parameter in bem.parameters())
        rank = max(1, round(n_trainable / sum(site.n_in + site.n_out for site in bem.sites)))
        try:
            return cls(tuple(module_name(bem, site) for site in bem.sites), rank, bem.config.scale, seed)
        except UnsupportedModel as error:
            return cls((), rank, bem.config.scale, seed, str(error))

    @contextmanager
    def on(self, host: Any, weights: LossWeights) -> Iterator[LoraBeside]:
        """In the block, a fresh LoRA is on the model. Raises `MissingExtra` without PEFT, `UnsupportedModel`."""
        peft = _peft()
        if self.why_not:
            raise UnsupportedModel(self.why_not)
        alpha = self.scale * self.rank
        config = peft.LoraConfig(r=self.rank, lora_alpha=alpha, target_modules=list(self.names), lora_dropout=0.0)
        with _kept_flags(host), torch.random.fork_rng():
            torch.manual_seed(self.seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about a property of models that PEFT reads
                peft_model = peft.get_peft_model(host, config, adapter_name=_NAME)
            try:
                yield LoraBeside(peft_model, self.rank, alpha, weights)
            finally:
                peft_model.unload()


@contextmanager
def saved_lora(host: Any, folder: Path) -> Iterator[None]:
    """In the block, a saved LoRA is on the model. Raises `MissingExtra` without PEFT."""
    with _kept_flags(host):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            peft_model = _peft().PeftModel.from_pretrained(host, str(folder))
        try:
            yield
        finally:
            peft_model.unload()


def n_of(folder: Path) -> int:
    """Return how many numbers a saved LoRA has."""
    return sum(factor.numel() for factor in load_file(folder / "adapter_model.safetensors").values())


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("a LoRA beside the adapter needs PEFT: pip install 'probemon[bem]'") from error
    return peft


@contextmanager
def _kept_flags(host: Any) -> Iterator[None]:
    """PEFT freezes the model."""
    learning: Mapping[str, bool] = {name: parameter.requires_grad for name, parameter in host.named_parameters()}
    try:
        yield
    finally:
        for name, parameter in host.named_parameters():
            parameter.requires_grad_(learning[name])
