"""A scorer of inspect-ai that reads concepts from the messages of a watched model.

Task(dataset=..., scorer=[match(), concept_fired("animal.n.01")])
"""

from __future__ import annotations

from typing import Any

from inspect_ai.model import ChatMessageAssistant, get_model
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import TaskState

from probemon.errors import ConfigError
from probemon.ops.inspect.provider import KEY, WatchedModel


@scorer(metrics=[mean(), stderr()])
def concept_fired(concept: str) -> Scorer:
    """Score 1 if a concept, or one below it, fired at a generated token of the sample, else 0; the mean is a share.

    - `concept`: an id, a name or a pattern with `*`
    - None, which is no score, if no generated token was scored
    - metadata: `n_tokens`, `n_unseen`, `n_fired`, and `strength`, the highest of the fires

    Raises `ConfigError` for a model of another provider, `RequestRefused` for an unknown or excluded concept.
    """

    async def score(state: TaskState, target: Target) -> Score | None:
        api = get_model().api
        if not isinstance(api, WatchedModel):
            raise ConfigError(f"concept_fired reads what {KEY}/MODEL records: evaluate with that provider")
        wanted = api.ids_below([concept])
        tokens = [pair for message in state.messages for pair in _tokens(message, wanted, concept, api)]
        n_unseen = sum(token["unseen"] is not None for token, _ in tokens)
        if len(tokens) == n_unseen:
            return None
        fires = [(token, strength) for token, strength in tokens if strength is not None]
        said = f"fired at {len(fires)} of {len(tokens)} tokens, {n_unseen} of them unseen"
        return Score(
            value=float(bool(fires)),
            explanation=said + (f"; first at {fires[0][0]['text']!r}" if fires else ""),
            metadata={
                "n_tokens": len(tokens),
                "n_unseen": n_unseen,
                "n_fired": len(fires),
                "strength": max((strength for _, strength in fires), default=None),
            },
        )

    return score


def _tokens(
    message: Any, wanted: frozenset[str], concept: str, api: WatchedModel
) -> list[tuple[dict[str, Any], float | None]]:
    """Return the generated tokens of a message, each with the strength of the strongest fire, or None."""
    told = (message.metadata or {}).get(KEY) if isinstance(message, ChatMessageAssistant) else None
    if told is None:
        return []
    if told["only"] is not None and not wanted <= api.ids_below(told["only"]):
        raise ConfigError(f"{concept!r} is not among the concepts that the generation reports: {told['only']}")
    numbers = {int(number) for number, about in told["concepts"].items() if about["concept"] in wanted}
    generated = [token for token in told["tokens"] if token["phase"] == "generated"]
    return [
        (token, max((s for n, s in zip(token["fired"], token["strengths"], strict=True) if n in numbers), default=None))
        for token in generated
    ]
