"""HTML of tokens for notebooks.

colours = Colours()
span = token_span(colours, " whale", leading, [], unseen="")
key = colours.legend()
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from probemon.monitor.result import ConceptScore
from probemon.util.harmless_text import clip
from probemon.util.static_html import Colours
from probemon.util.templates import macros

_LONGEST_TOKEN, _LONGEST_TITLE = 200, 500


def token_span(
    colours: Colours,
    text: str,
    leading: Sequence[ConceptScore],
    ranked: Sequence[ConceptScore],
    *,
    unseen: str,
    own: bool = False,
) -> str:
    """Return a token in the colour of its first `leading` concept, hatched if `unseen`, with details on hover.

    `ranked`: concepts of packs without thresholds
    `own`: `text` names a token that adds no text
    """
    kinds = ["own"] * own + ["unseen"] * bool(unseen)
    kinds += [colours.of(leading[0].path[0], leading[0].strength)] if leading else []
    details = [f"unseen: {unseen}"] if unseen else [described(concept) for concept in leading]
    details += [f"ranked, not firing: {described(concept)}" for concept in ranked]
    shown = text if len(text) <= _LONGEST_TOKEN else clip(text, _LONGEST_TOKEN)  # keeps line ends
    title = "\n".join(details)
    title = title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}…"
    return macros("monitor/result.html.j2").token(shown, " ".join(kinds), title)


def described(concept: ConceptScore) -> str:
    """Return a concept's path and scores, in a line."""
    parts = [f"score {concept.score:.2f}"]
    if not math.isnan(concept.strength):
        parts.append(f"strength {concept.strength:+.1f}")
    if not math.isnan(concept.precision):
        parts.append(f"{concept.precision:.0%} right")
    return f"{' > '.join(clip(name, 60) for name in concept.path)}: {', '.join(parts)}"
