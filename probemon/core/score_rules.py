"""SCORE_RULES: how the scores of a pack follow from those of its probes; whether a rule multiplies along the path."""

from __future__ import annotations

from probemon.errors import ConfigError

# Each probe by itself; or times the largest score of its parents.
INDEPENDENT, PATH = SCORE_RULES = ("independent", "path")


def follows_path(score_rule: str) -> bool:
    """Whether a score is multiplied by the largest of its parents'. Raises `ConfigError` for a rule that is not
    computed, which would be taken for another.
    """
    if score_rule not in (INDEPENDENT, PATH):
        raise ConfigError(
            f"score_rule {score_rule!r} is not computed, only {INDEPENDENT} and {PATH}: use one of these, or add it to"
            " core/score_rules.py and to what asks it"
        )
    return score_rule == PATH
