"""Learned levels: each site chooses prefix, chunk or token codes, at a price in operations.

    bem = attach_bem(model, BemConfig(level="learned"))
    train(bem, batches, settings, LossWeights(operations=1e-6))        # nats for each operation a token
    bem.levels.chosen()                                                # {"o.0": "prefix", "down.0": "token", ..}
    expected_operations(bem, 512)

In training mode each forward draws each site's level: straight-through Gumbel softmax of three logits (Jang et al.
2017). In evaluation mode the largest logit wins, ties to the coarser level. Sites of queries, keys and values always
take chunk codes.

Operations are those of a level's router (a multiply-add is two), averaged over a row. Sites share routers; in
evaluation mode unused ones run only if watched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probemon.adapters.bem.config import LEVELS, BemConfig
from probemon.adapters.bem.controller import Codes
from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.governance import Governor
from probemon.adapters.bem.sites import Site
from probemon.errors import ConfigError
from probemon.util.checks import check_count

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem


class LearnedLevels(nn.Module):
    """Logits `[S, 3]` of sites with a choice, in the order of `LEVELS`; zeros at the start."""

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        super().__init__()
        self._config, self._updates = config, (updates,)  # in a tuple: not a submodule
        self._choosing = [site for site in sites if not site.chunked]
        self._fixed = [site for site in sites if site.chunked]
        self._governors: dict[tuple[str, ...], Governor | FormGovernor] = {}
        self.logits = nn.Parameter(torch.zeros(len(self._choosing), len(LEVELS), dtype=torch.float32))

    def chosen(self) -> dict[str, str]:
        """Return each site's level in evaluation mode, by name."""
        level = self.logits.detach().argmax(dim=1).tolist()
        return {site.name: LEVELS[i] for site, i in zip(self._choosing, level, strict=True)}

    def needed(self) -> set[str]:
        """Return the levels in use in evaluation mode."""
        return set(self.chosen().values()) | ({"chunk"} if self._fixed else set())

    def limit(self, codes: Codes, governor: Governor | FormGovernor, training: bool) -> dict[str, Tensor]:
        """Return codes `[B * T, ..]` by site key within the limits, each at its site's level. In `training` levels are
        drawn, with a gradient.
        """
        flat = {level: code.flatten(0, 1) for level, code in codes.by_level().items()}
        if training:
            noisy = nn.functional.gumbel_softmax(self.logits, hard=True)
            limited = [governor.apply({True: flat["chunk"], False: flat[level]}) for level in LEVELS]
            applied = {site.key: limited[LEVELS.index("chunk")][site.key] for site in self._fixed}
            for site, weight in zip(self._choosing, noisy.to(codes.level.device), strict=True):
                applied[site.key] = torch.stack([w * x[site.key] for w, x in zip(weight, limited, strict=True)]).sum(0)
            return applied
        by_level: dict[str, list[Site]] = {"chunk": list(self._fixed)} if self._fixed else {}
        chosen = self.chosen()
        for site in self._choosing:
            by_level.setdefault(chosen[site.name], []).append(site)
        applied = {}
        for level, sites in by_level.items():
            applied |= self._governor(governor, sites).apply(dict.fromkeys((True, False), flat[level]))
        return applied

    def _governor(self, whole: Governor | FormGovernor, sites: list[Site]) -> Governor | FormGovernor:
        key = tuple(site.key for site in sites)
        if key not in self._governors:
            if len(self._governors) >= len(LEVELS):  # the levels have changed
                self._governors.clear()
            self._governors[key] = type(whole)(self._config, sites, self._updates[0])
        return self._governors[key]


def level_operations(config: BemConfig, n_tokens: int) -> dict[str, float]:
    """Return each level's operations a token, for a row of `n_tokens`. Raises `ConfigError`."""
    check_count("n_tokens", n_tokens, least=1)
    width, size, chunk = config.width, config.code_size, config.chunk_tokens
    n_chunks = n_tokens // chunk  # complete ones
    made = {"prefix": n_chunks + 1, "chunk": n_chunks, "token": n_tokens}
    inputs = {"prefix": width, "chunk": 2 * width, "token": 2 * width}
    return {level: made[level] * 2 * width * (inputs[level] + size) / n_tokens for level in LEVELS}


def expected_operations(bem: Bem, n_tokens: int) -> Tensor:
    """Return the expected operations a token, with a gradient to the logits. Raises `ConfigError` if levels are not
    learned.
    """
    if bem.levels is None:
        raise ConfigError(
            f"level is {bem.config.level!r}, so no level is learned, and operations have no gradient: use"
            " BemConfig(level='learned')"
        )
    price: Mapping[str, float] = level_operations(bem.config, n_tokens)
    prices = bem.levels.logits.new_tensor([price[level] for level in LEVELS])
    return (bem.levels.logits.softmax(dim=1) @ prices).mean()
