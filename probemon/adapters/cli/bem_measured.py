"""What `bem train` and `bem eval` tell of an adapter and of the LoRA beside it: losses, limits, answers.

measured = Measured(measure(bem, batches, documents), asked(lessons, tokenizer))
measured.answer("adapter", bem.host, tokenizer)
measured.say()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probemon.cli.terminal import say
from probemon.util.harmless_text import clip

if TYPE_CHECKING:
    from probemon.adapters.bem.evaluation.held_out import ByDocument, Difference, HeldOut
    from probemon.adapters.bem.lessons import Lesson

LORA = "lora"  # its folder, in the adapter's
_N_ANSWERS, _ANSWER_TOKENS, _PROMPT_CHARACTERS, _MOST_CHARACTERS = 2, 40, 80, 200
_MOST = 0.5  # share of updates at a limit that is worth a warning


@dataclass
class Asked:
    """A prompt, the answer that its row has, and answers by who gave them."""

    prompt_ids: tuple[int, ...]
    prompt: str
    wanted: str
    answers: dict[str, str] = field(default_factory=dict)


def asked(lessons: Sequence[Lesson], tokenizer: Any) -> list[Asked]:
    """Return the first two held-out prompts; of a text, its first half."""
    found = list[Asked]()
    for lesson in lessons[:_N_ANSWERS]:
        first = next(place for place, counts in enumerate(lesson.counted) if counts and place)
        n = first if first > 1 else max(1, len(lesson.ids) // 2)
        end = next((i for i in range(n, len(lesson.ids)) if not lesson.counted[i]), len(lesson.ids))
        prompt, wanted = (_text(tokenizer, ids) for ids in (lesson.ids[:n], lesson.ids[n:end]))
        found.append(Asked(lesson.ids[:n], prompt, wanted))
    return found


@dataclass
class Measured:
    """Held-out losses of an adapter, of the bare model, and of the LoRA beside it.

    - `at_limits`: share of updates at `spectral_cap` or `trust_region`, by data; None without either
    """

    held_out: HeldOut
    questions: list[Asked]
    lora: ByDocument | None = None
    n_trainable_of_lora: int = 0
    lora_record: dict[str, Any] = field(default_factory=dict)
    why_no_lora: str = ""
    at_limits: dict[str, float | None] = field(default_factory=dict)

    def answer(self, who: str, host: Any, tokenizer: Any) -> None:
        """Let the model as it is now answer the prompts, by its likeliest tokens."""
        import torch

        for question in self.questions:
            ids = torch.tensor([question.prompt_ids], device=host.device)
            out = host.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_ANSWER_TOKENS, do_sample=False
            )
            question.answers[who] = _text(tokenizer, out[0, ids.shape[1] :].tolist())

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        loss, bare = self.held_out.adapter, self.held_out.bare
        told: dict[str, Any] = {
            "held_out": {
                "documents": len(loss.sums),
                "labels": int(loss.labels.sum()),
                "loss": loss.loss,
                "bare_loss": bare.loss,
                **_numbers(self.held_out.difference),
            },
            "at_limits": self.at_limits,
            "answers": [{"prompt": one.prompt, "wanted": one.wanted, **one.answers} for one in self.questions],
        }
        if self.lora is not None:
            told["lora"] = {
                "trainable": self.n_trainable_of_lora,
                "loss": self.lora.loss,
                **{name: value for name, value in self.lora_record.items() if name in ("n_steps", "best_step")},
                "adapter_minus_lora": _numbers(self._beside(self.lora)),
            }
        return told

    def say(self, *about: str) -> None:
        """Print it: first which is better, then what is known of the adapter, losses and answers."""
        loss, bare, difference = self.held_out.adapter, self.held_out.bare, self.held_out.difference
        lines = [f"no LoRA beside it: {self.why_no_lora}"] if self.why_no_lora else list[str]()
        if self.lora is not None:
            lines.append(_which_is_better(self._beside(self.lora)))
        lines += about
        lines.append(f"held out: {difference.n_documents} documents, {int(loss.labels.sum()):,} labels, nats a label")
        lines.append(
            f"  adapter {loss.loss:.4f}, bare model {bare.loss:.4f}: {difference.value:+.4f} ({_interval(difference)}),"
            f" better on {difference.n_better} of {difference.n_documents}"
        )
        if self.lora is not None:
            lines.append(f"  LoRA    {self.lora.loss:.4f}, with {self.n_trainable_of_lora:,} trainable numbers")
        for name, share in self.at_limits.items():
            if share is None:
                continue
            lines.append(f"limits hold {100 * share:.0f} % of the updates on the data of {name}")
            if share > _MOST:
                lines.append(
                    "  warning: so limited an adapter learns little: --set spectral_cap=null trust_region=null, or"
                    " larger limits"
                )
        for question in self.questions:
            lines.append(_line(question.prompt[-_PROMPT_CHARACTERS:]))
            told = {**question.answers, "wanted": question.wanted}
            lines += [f"  {who:8}{_line(text)}" for who, text in told.items()]
        say(*lines)

    def _beside(self, lora: ByDocument) -> Difference:
        from probemon.adapters.bem.evaluation.held_out import Difference

        return Difference.of(self.held_out.adapter, lora)


def _which_is_better(difference: Difference) -> str:
    by = f"adapter minus LoRA {difference.value:+.4f} nats a label ({_interval(difference)})"
    on = f"on {difference.n_better} of {difference.n_documents} documents the adapter is better"
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return f"neither is shown to be better, the adapter or a LoRA of its size: {by}; {on}"
    better, other = (
        ("the adapter", "a LoRA of its size") if difference.value < 0 else ("a LoRA of its size", "the adapter")
    )
    return f"{better} is better than {other}: {by}; {on}"


def _interval(difference: Difference) -> str:
    if difference.low is None or difference.high is None:
        why = "two documents or more" if difference.n_documents < 2 else "SciPy (pip install scipy)"
        return f"no interval: it needs {why}"
    return f"95 % by document: {difference.low:+.4f} to {difference.high:+.4f}"


def _numbers(difference: Difference) -> dict[str, Any]:
    return {
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "documents_better": difference.n_better,
    }


def _line(text: str) -> str:
    return clip(" ".join(text.split()), _MOST_CHARACTERS)


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
