"""SCORE_RULES: how a pack's scores follow from its probes."""

from __future__ import annotations

from probemon.errors import ConfigError

# Each probe by itself, or times its best parent's score.
INDEPENDENT, PATH = SCORE_RULES = ("independent", "path")


def follows_path(score_rule: str) -> bool:
    """True if a score is multiplied by its best parent's. Raises `ConfigError` for an unknown rule."""
    if score_rule not in (INDEPENDENT, PATH):
        raise ConfigError(
            f"score_rule {score_rule!r} is not computed, only {INDEPENDENT} and {PATH}: use one of these, or add it to"
            " core/score_rules.py and to what asks it"
        )
    return score_rule == PATH
