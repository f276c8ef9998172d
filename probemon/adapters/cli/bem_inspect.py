"""The command bem inspect.

probemon bem inspect adapter/
probemon bem inspect adapter/ --model demo --text "Tell me about whales."
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.adapters.cli.bem_eval import Adapter
from probemon.cli import options as opt
from probemon.cli.common import load_aloud, use_threads
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.errors import ConfigError
from probemon.host.text_tokens import ids_of

if TYPE_CHECKING:
    from rich.text import Text

    from probemon.adapters.bem import BemConfig
    from probemon.adapters.bem.saved import Saved

_SHOWN = 16  # numbers of a code
_WIDEST = 1000  # columns of a file or pipe
_BARS = "▁▂▃▄▅▆▇█"


def inspect(
    adapter: Adapter,
    model: Annotated[str, typer.Option(help="Its model: a folder, a hub name or demo. Needed to see codes.")] = "",
    text: Annotated[str, typer.Option(help="A text, whose codes are shown token by token.")] = "",
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Show ADAPTER's settings, sites and trainable numbers; with --model and --text also the code of each token."""
    from probemon.adapters.bem.saved import read_saved

    if text.strip() and not model:
        raise ConfigError("--text needs the model that reads it: give --model too")
    use_threads(threads)
    saved = read_saved(adapter)
    description = described(saved)
    tokens: list[dict[str, Any]] = []
    if model:
        loaded_model, tokenizer = load_aloud(model, device, dtype)
        n_model_parameters = sum(parameter.numel() for parameter in loaded_model.parameters())
        description["share_of_host"] = description["trainable"] / n_model_parameters
        if text.strip():
            tokens = description["tokens"] = codes_of(loaded_model, tokenizer, adapter, text)
    if as_json:
        answer(description)
        return
    config = description["config"]
    share = f", {100 * description['share_of_host']:.2f} % of the model's" if model else ""
    say(
        f"{adapter}: {size_of(saved.config)} for {description['host']['model']}"
        f" ({description['host']['n_layers']} layers of {description['host']['hidden_size']})",
        f"{description['trainable']:,} trainable numbers{share}: controller {description['of_controller']:,},"
        f" updates {description['of_updates']:,}{', in a byte each' if description['int8'] else ''}"
        f"{f', levels {n}' if (n := description['of_levels']) else ''}",
        f"sites: {_in_words(description['host']['sites'])}",
        f"level {config['level']}, chunks of {config['chunk_tokens']} tokens",
        f"limits: singular values {config['spectral_cap']}, all updates together {config['trust_region']}",
    )
    if tokens:
        say("codes: each number from its least here to its most")
        console = terminal(soft_wrap=False)
        if not console.is_terminal:
            console.width = _WIDEST
        console.print(_table(tokens))


def described(saved: Saved) -> dict[str, Any]:
    """Return a saved adapter's settings and sizes."""
    from dataclasses import asdict

    sizes = {"controller": 0, "updates": 0, "levels": 0}
    for name, tensor in saved.tensors.items():
        sizes[name.split(".")[0]] += tensor.numel()
    return {
        "adapter": str(saved.folder),
        "config": asdict(saved.config),
        "host": dict(saved.host),
        "trainable": sum(sizes.values()),
        "of_controller": sizes["controller"],
        "of_updates": sizes["updates"],
        "of_levels": sizes["levels"],
        "int8": saved.int8,
    }


def codes_of(host: Any, tokenizer: Any, adapter: Any, text: str) -> list[dict[str, Any]]:
    """Return each token of a text with its code and confidence, at attention outputs and MLPs.

    With learned levels, codes are of the level that most sites chose.
    """
    import torch

    from probemon.adapters.bem import attach_bem
    from probemon.adapters.bem.config import LEVELS
    from probemon.adapters.bem.losses import codes_taken, recorded_codes

    ids = torch.tensor([ids_of(tokenizer, text)], device=host.device)
    with attach_bem(host, adapter) as bem, recorded_codes(bem) as recorded, torch.no_grad():
        host(ids, use_cache=False)
    codes = recorded[-1]
    if bem.levels is not None:
        by_site = list(bem.levels.chosen().values())
        most = max(LEVELS, key=by_site.count)
        n_of = by_site.count(most)
        name = most if n_of == len(by_site) else f"{most} ({n_of} of {len(by_site)} sites)"
        shown, levels = codes.of(most)[0], [name] * ids.shape[1]
    else:
        taken = codes_taken(bem, codes)
        shown = taken[min(taken)][0]  # attention outputs and MLPs, if there are any
        levels = ["chunk" if min(taken) else LEVELS[level] for level in codes.level[0].tolist()]
    return [
        {
            "token": tokenizer.decode([int(id)]),
            "level": level,
            "code": code.tolist(),
            "confidence": float(confidence),
        }
        for id, level, code, confidence in zip(ids[0], levels, shown, codes.confidence[0], strict=True)
    ]


def size_of(config: BemConfig) -> str:
    """Return an adapter's form and code size, in words."""
    if config.form == "kronecker":
        return f"kronecker of {config.terms} {'term' if config.terms == 1 else 'terms'}"
    details = {"head_groups": f" in each of {config.groups} groups", "rank_mask": f", {config.active} of them active"}
    return f"{config.form} of rank {config.rank}{details.get(config.form, '')}"


def _in_words(sites: dict[str, Any]) -> str:
    layers: dict[str, list[int]] = {}
    for name in sites:
        kind, _, layer = name.partition(".")
        layers.setdefault(kind, []).append(int(layer))
    return ", ".join(
        f"{kind} of {len(numbers)} layers ({min(numbers)} to {max(numbers)})" for kind, numbers in layers.items()
    )


def _table(tokens: list[dict[str, Any]]) -> Any:
    from rich.text import Text

    from probemon.cli.watch.live_view import printable

    dimensions = list(zip(*(token["code"] for token in tokens), strict=True))
    least, most = list(map(min, dimensions)), list(map(max, dimensions))
    table = plain_table()
    for heading in ("token", "level", "code", "largest change"):
        table.add_column(heading, no_wrap=True)
    table.add_column("sure", justify="right", no_wrap=True)
    means = [sum(values) / len(tokens) for values in dimensions]
    for token in tokens:
        code = token["code"]
        away = max(range(len(code)), key=lambda i: abs(code[i] - means[i]))
        table.add_row(
            Text(printable(token["token"])),
            token["level"],
            _bars(code, least, most),
            f"{away}: {code[away] - means[away]:+.2f}",
            f"{token['confidence']:.2f}",
        )
    return table


def _bars(code: list[float], least: list[float], most: list[float]) -> Text:
    from rich.text import Text

    shares = [
        (value - low) / (high - low) if high > low else 0.5 for value, low, high in zip(code, least, most, strict=True)
    ]
    suffix = f" and {len(code) - _SHOWN} more" if len(code) > _SHOWN else ""
    return Text("".join(_BARS[min(7, int(8 * share))] for share in shares[:_SHOWN]) + suffix)
