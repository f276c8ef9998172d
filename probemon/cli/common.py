"""Shared steps of commands: loading, threads, prompts and progress.

model, tokenizer = load_aloud("demo", "cpu")
with progress_bar("import", unit="probe") as bar: ...
"""

from __future__ import annotations

import difflib
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from probemon.cli.terminal import say, terminal
from probemon.errors import ChatRefused, ConfigError
from probemon.host.chat_template import render
from probemon.host.loading import check_is_no_pack, load_model, slow_number

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager
    from probemon.packs.group import AnyPack, PackGroup

_LONG_READING = 100_000  # tokens
COMPILES = "compiling code for this processor, as at every first start: about half a minute"


def check_generation(prompt: str, max_new_tokens: int) -> None:
    """Raise `ConfigError` for an empty prompt or nothing to generate."""
    if not prompt.strip():
        raise ConfigError("the prompt is empty: say something with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens is {max_new_tokens}: give 1 or more")


def chat_messages(tokenizer: Any, prompt: str, system: str | None = None) -> Any:
    """Return the prompt as chat messages, or as it is without a chat template. Raises `ConfigError`."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if system is None:
        return [{"role": "user", "content": prompt}] if has_template else prompt
    if not has_template:
        raise ConfigError("this model has no chat template, so there is no place for --system: put it into --prompt")
    messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
    try:
        render(tokenizer, messages, add_generation_prompt=True)
    except ChatRefused as error:
        if error.at == 0:
            raise ConfigError(f"the model takes no --system ({error}): put it into --prompt") from error
        raise ConfigError(str(error)) from error
    return messages


def sampling_arguments(
    sample: bool, temperature: float | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """Return arguments for `generate`. Raises `ConfigError`."""
    sampling_options = {
        name: value for name, value in {"--temperature": temperature, "--top-p": top_p}.items() if value is not None
    }
    if sampling_options and not sample:
        raise ConfigError(
            f"{' and '.join(sampling_options)} without --sample: the most likely token is taken, so add --sample"
        )
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError(f"--temperature is {temperature:g}: give more than 0")
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p is {top_p:g}: give more than 0 and at most 1")
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"--seed is {seed}: give 0 or more, and less than 2**63")
    arguments = {"temperature": temperature, "top_p": top_p}
    return {"do_sample": sample, **{name: value for name, value in arguments.items() if value is not None}}


def check_fits(host: Any, tokenizer: Any, messages: Any) -> None:
    """Raise `ConfigError` if a prompt exceeds the model's context."""
    from probemon.monitor.stream import encode

    config: Any = getattr(host, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text, "max_position_embeddings", None)
    n_tokens = encode(tokenizer, messages)["input_ids"].shape[1]
    if isinstance(most, int) and n_tokens >= most > 0:
        raise ConfigError(f"the prompt has {n_tokens:,} tokens, and the model reads at most {most:,}: shorten it")


MODEL_FIRST = "give the model first, then the pack"


def pack_for(model: str, pack: str | None) -> str:
    """Return PACK, by default the demo model's. Raises `ConfigError`."""
    check_is_no_pack(model, MODEL_FIRST)
    if pack is None and model != "demo":
        near = ", did you mean 'demo'?" if difflib.get_close_matches(model, ["demo"]) else ""
        nowhere = "" if os.path.isdir(model) else f", and there is no folder {model!r} here"
        raise ConfigError(f"PACK is missing: only the model 'demo' has one that comes with probemon{near or nowhere}")
    return "demo" if pack is None else pack


def demo_packs(alert_set: str | None = None) -> PackGroup:
    """Return the two packs of the demo model; `alert_set`: of the nouns."""
    from probemon.packs.group import PackGroup
    from probemon.packs.local import DEMO, DEMO_CONCEPTS
    from probemon.packs.pack import ProbePack

    nouns = ProbePack.from_pretrained(DEMO)
    nouns = nouns if alert_set is None else nouns.with_alert_set(alert_set)
    return PackGroup({"nouns": nouns, "concepts": ProbePack.from_pretrained(DEMO_CONCEPTS)})


def check_beside_file(packs: object, alert_set: str | None = None, audit_rate: float = 0.0) -> None:
    """Raise `ConfigError` for an argument that a deployment file sets."""
    for name, value in (("PACK", packs), ("--alert-set", alert_set), ("--audit-rate", audit_rate)):
        if value:
            raise ConfigError(f"{name} belongs in the deployment file: leave it out, or --deployment")


def use_threads(threads: int) -> None:
    """Set torch's threads, unless 0. Raises `ConfigError`."""
    import torch

    if threads < 0:
        raise ConfigError(f"--threads is {threads}: give 1 or more, or 0 for what torch chooses")
    if threads:
        torch.set_num_threads(threads)


def bytes_of(budget: float) -> int:
    """Convert GB to bytes."""
    if not (budget == 0 or 1e-9 <= budget < math.inf):
        raise ConfigError(f"--budget is {budget:g}: give a number of GB, one byte (1e-09) or more")
    return int(budget * 1e9)


def load_aloud(name: str, device: str, dtype: str = "auto", *, reads_texts: bool = False) -> tuple[Any, Any]:
    """Call `load_model`; print slow steps, and advice for reading many texts."""
    from rich.text import Text

    from probemon.engine.kernels import check_device

    check_device(device)
    aside = terminal(error=True)
    with aside.status(Text(f"loading {name}")) if aside.is_terminal else nullcontext():
        model, tokenizer = load_model(name, device, aside.print, dtype=dtype)
    if reads_texts and (number := slow_number(model)):
        say(f"this CPU has no {number} instructions: --dtype float32 reads texts several times faster", error=True)
    return model, tokenizer


@contextmanager
def told_if_long(what: str, seconds: float = 3.0, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Print `what` in a terminal if the block takes `seconds` and `when()` is true."""
    if not terminal(error=True).is_terminal:
        yield
        return
    ended = threading.Event()

    def wait() -> None:
        pause = seconds
        while not ended.wait(pause):
            if when():
                say(what, error=True)
                return
            pause = 0.5

    threading.Thread(target=wait, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def make_manager(pack: AnyPack, **settings: Any) -> DynamicProbeManager:
    """Make a manager; say so if code is compiled."""
    from probemon.engine.kernels import n_compiled
    from probemon.manager import DynamicProbeManager

    before = n_compiled()
    with told_if_long(COMPILES, when=lambda: n_compiled() > before):
        return DynamicProbeManager(pack, **settings)


@contextmanager
def tokens_read() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of hidden states for the block, which is told how many tokens are read, and of how many.

    Outside a terminal, a long reading has a line for each tenth.
    """
    with progress_bar("states", total=1, unit="") as bar:
        told = 0

        def progress(n: int, total: int) -> None:
            nonlocal told
            bar.total = total
            bar.update(n - bar.n)
            if bar.disable and total >= _LONG_READING and 10 * n // total > told:
                told = 10 * n // total
                say(f"{n:,} of {total:,} tokens are read", error=True)

        yield progress


def progress_bar(label: str, *, total: float | None = None, unit: str = "doc", postfix: str = "") -> Any:
    """Return a tqdm bar on standard error, for terminals only."""
    from tqdm import tqdm

    counts = "{n:.0f}/{total_fmt} {unit} " if unit else ""
    return tqdm(
        total=total,
        unit=unit,
        desc=label,
        disable=None,
        dynamic_ncols=True,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| " + counts + "[{elapsed}<{remaining}" + postfix + "]",
    )
