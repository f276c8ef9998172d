"""Evals of inspect-ai with probes; inspect-ai finds the provider and the scorer by its entry point.

inspect eval task.py --model probemon/demo
inspect score LOG --scorer probemon/concept_fired -S concept=animal.n.01
"""

from probemon.errors import MissingExtra

try:
    from probemon.ops.inspect.provider import WatchedModel as WatchedModel
    from probemon.ops.inspect.scorer import concept_fired as concept_fired
except ModuleNotFoundError as error:
    if error.name not in ("anyio", "inspect_ai"):
        raise
    raise MissingExtra("evals need inspect-ai: pip install 'probemon[inspect]'") from error
