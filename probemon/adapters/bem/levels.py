"""A level for each site, which training chooses: prefix, chunk or token codes, at a price in operations.

    bem = attach_bem(model, BemConfig(level="learned"))
    train(bem, batches, settings, LossWeights(operations=1e-6))        # nats for each operation a token
    bem.levels.chosen()                                                # {"o.0": "prefix", "down.0": "token", ..}
    expected_operations(bem, 512)                                      # what the penalty is of

While the host is in training mode each site draws a level in every forward: the largest of its three logits, each with
Gumbel noise; the gradient is that of their softmax (Jang et al. 2017, straight-through). In evaluation mode it is the
largest logit, ties to the coarser level. It depends on nothing else, so what a level promises holds: with a cache as
without, and however a forward is cut. Sites of queries, keys and values take chunk codes, as ever.

The operations of a level are those of its router, as products have them (a multiply-add is two), for one token of a
forward of a whole row: token codes are made at every token, chunk and prefix codes once in N. Sites share what a router
costs. A router that no site takes is not run in evaluation mode, unless the routing is watched; one that few sites take
costs what it costs.
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
    """Logits `[S, 3]` of the sites that have a choice, in the order of `LEVELS`; zeros at the start."""

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        super().__init__()
        self._config, self._updates = config, (updates,)  # in a tuple: they are no part of this module
        self._choosing = [site for site in sites if not site.chunked]
        self._fixed = [site for site in sites if site.chunked]
        self._governors: dict[tuple[str, ...], Governor | FormGovernor] = {}
        self.logits = nn.Parameter(torch.zeros(len(self._choosing), len(LEVELS), dtype=torch.float32))

    def chosen(self) -> dict[str, str]:
        """Return the level of each site by its name, as evaluation mode takes it."""
        level = self.logits.detach().argmax(dim=1).tolist()
        return {site.name: LEVELS[i] for site, i in zip(self._choosing, level, strict=True)}

    def needed(self) -> set[str]:
        """Return the levels of which some site takes codes in evaluation mode."""
        return set(self.chosen().values()) | ({"chunk"} if self._fixed else set())

    def limit(self, codes: Codes, governor: Governor | FormGovernor, training: bool) -> dict[str, Tensor]:
        """Return codes `[B * T, ..]` by site key within the limits, each site's of its level; while `training`, of one
        that is drawn, with a gradient to the logits.
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
        """What limits some of the sites, kept as long as they are these."""
        key = tuple(site.key for site in sites)
        if key not in self._governors:
            if len(self._governors) >= len(LEVELS):  # the levels have changed
                self._governors.clear()
            self._governors[key] = type(whole)(self._config, sites, self._updates[0])
        return self._governors[key]


def level_operations(config: BemConfig, n_tokens: int) -> dict[str, float]:
    """Return the operations a token of making each level's codes for a row of `n_tokens`. Raises `ConfigError`."""
    check_count("n_tokens", n_tokens, least=1)
    width, size, chunk = config.width, config.code_size, config.chunk_tokens
    n_chunks = n_tokens // chunk  # that are complete
    made = {"prefix": n_chunks + 1, "chunk": n_chunks, "token": n_tokens}
    inputs = {"prefix": width, "chunk": 2 * width, "token": 2 * width}
    return {level: made[level] * 2 * width * (inputs[level] + size) / n_tokens for level in LEVELS}


def expected_operations(bem: Bem, n_tokens: int) -> Tensor:
    """Return the operations a token that an adapter's sites are expected to ask for, by their probabilities now, with a
    gradient; sites share what a router costs. Raises `ConfigError` where levels are not learned.
    """
    if bem.levels is None:
        raise ConfigError(
            f"level is {bem.config.level!r}, so no level is learned, and operations have no gradient: use"
            " BemConfig(level='learned')"
        )
    price: Mapping[str, float] = level_operations(bem.config, n_tokens)
    prices = bem.levels.logits.new_tensor([price[level] for level in LEVELS])
    return (bem.levels.logits.softmax(dim=1) @ prices).mean()
