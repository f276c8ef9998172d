"""Commands that make packs from packs, compare and push them.

probemon pack merge animals/ deception/ both/
probemon pack attach PACK animal mine/ OUT --score-rule path
probemon pack subset PACK whales/ --concept whale --concept "ship*"
probemon pack rename PACK mine/ --name mine --concepts names.json
probemon pack diff before/ after/
probemon pack push PACK org/name
probemon hierarchy PACK tree.json
probemon quantize PACK small/
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.util.counted import counted
from probemon.util.strict_json import RepeatedKey, loads

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

pack = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Make packs of packs, compare, and push them.",
)

_MAX_JSON_BYTES = 64 << 20
_NEW = "The new pack: a folder that is not there yet."
Out = Annotated[str, typer.Argument(metavar="OUT", help=_NEW)]
Rounding = Annotated[
    str | None,
    typer.Option(
        "--dtype", help="bf16 or fp32: the weights of the new pack, if those of its parts differ. It moves scores."
    ),
]


@pack.command()
def merge(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="PACK PACK ... OUT", help="Two packs or more, then the folder of the new one."),
    ],
    name: Annotated[str, typer.Option(help="Name of the new pack; else that of its folder.")] = "",
    prefix: Annotated[bool, typer.Option("--prefix", help="Put each pack's name before its ids, as name:id.")] = False,
    rounding: Rounding = None,
    overwrite: opt.OverwritePack = False,
) -> None:
    """Put the probes of several packs for one model into one pack."""
    from probemon.packs.edit import merge as merge_packs

    if len(folders) < 3:
        raise ConfigError(f"{len(folders)} folders: give two packs or more, and the folder of the new one last")
    *sources, out = folders
    packs = [_open(source) for source in sources]
    by_name = {opened.name: opened for opened in packs}
    if prefix and len(by_name) < len(packs):
        raise ConfigError(
            "two of the packs have one name: rename one first, by probemon pack rename PACK OUT --name NAME"
        )
    sources_of = by_name if prefix else packs
    merged = merge_packs(sources_of, out, name=name or Path(out).name, dtype=rounding, overwrite=overwrite)
    _say_written(merged, out)


@pack.command()
def attach(
    source: opt.Pack,
    concept: Annotated[str, typer.Argument(metavar="CONCEPT", help="A concept of the pack: an id or a name.")],
    probes: Annotated[str, typer.Argument(metavar="PROBES", help="The pack of the new probes, without a hierarchy.")],
    out: Out,
    score_rule: Annotated[
        str,
        typer.Option(
            help="path: a new score is multiplied by that of CONCEPT. independent: it is the probe's own, and the probe"
            " a root if the pack has the path rule.",
        ),
    ],
    alert_threshold: Annotated[float | None, typer.Option(help="Of the new scores; else that of PROBES.")] = None,
    rounding: Rounding = None,
    name: opt.PackName = "",
    overwrite: opt.OverwritePack = False,
) -> None:
    """Put probes of your own at a concept of a pack."""
    from probemon.packs.attached import attach_below

    attached = attach_below(
        _open(source),
        concept,
        _open(probes),
        out,
        score_rule=score_rule,
        alert_threshold=alert_threshold,
        dtype=rounding,
        name=name or None,
        overwrite=overwrite,
    )
    _say_written(attached, out)


@pack.command()
def subset(
    source: opt.Pack,
    out: Out,
    concept: Annotated[
        list[str],
        typer.Option(help="A concept to keep: an id, a name, or a pattern such as 'ship*'. May be repeated."),
    ],
    above: Annotated[bool, typer.Option("--above/--no-above", help="Keep all concepts above them.")] = True,
    below: Annotated[bool, typer.Option("--below/--no-below", help="Keep all concepts below them.")] = True,
    name: opt.PackName = "",
    overwrite: opt.OverwritePack = False,
) -> None:
    """Make a pack of some concepts, with those above and below them."""
    from probemon.packs.edit import subset as cut

    smaller = cut(_open(source), out, concept, above=above, below=below, name=name or None, overwrite=overwrite)
    _say_written(smaller, out)


@pack.command()
def rename(
    source: opt.Pack,
    out: Out,
    name: Annotated[str, typer.Option(help="New name of the pack.")] = "",
    concepts: Annotated[
        Path | None, typer.Option(help='A JSON file: by id, a new name, or {"id": ..., "name": ...}.')
    ] = None,
    overwrite: opt.OverwritePack = False,
) -> None:
    """Give a pack, or its concepts, other names."""
    from probemon.packs.edit import rename as rename_pack

    names = None if concepts is None else read_object(concepts)
    _say_written(rename_pack(_open(source), out, name=name or None, concepts=names, overwrite=overwrite), out)


@pack.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A pack.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every concept that differs.")] = False,
) -> None:
    """Show what differs between two packs, concept by concept. The exit status is 1 if anything does."""
    from probemon.packs.diff import pack_diff

    difference = pack_diff(_open(a), _open(b))
    _report(difference, difference.as_dict(), as_json)
    if not difference.same:
        raise typer.Exit(1)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `ConfigError`."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes, at most {_MAX_JSON_BYTES:,} are read")
        content = loads(path.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except RepeatedKey as error:
        raise ConfigError(f"{path}: {error}") from None
    except FileNotFoundError:
        what = "is a link that leads nowhere: mend it, or give the file itself"
        raise ConfigError(f"{path} {what}" if path.is_symlink() else f"no such file: {str(path)!r}") from None
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({str(error)[:200]})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}: give a JSON object")
    return content


def _open(source: str) -> ProbePack:
    from probemon.packs.pack import ProbePack

    return ProbePack.from_pretrained(source)


def _report(outcome: object, content: dict[str, Any], as_json: bool) -> None:
    if as_json:
        answer(content)
    else:
        say(*str(outcome).split("\n"))


def _say_written(pack: ProbePack, out: str) -> None:
    say(
        f"wrote {out}: {pack.name}, {counted(pack.n_probes, 'probe')}, {pack.architecture},"
        f" {pack.weight_bytes() / 1e6:.1f} MB"
    )


def hierarchy(
    source: opt.Pack,
    tree: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TREE.json]",
            help=(
                'The hierarchy: names within names, {"animal": {"whale": {}}}, or parents by name, {"whale":'
                ' ["animal"]}.'
            ),
        ),
    ] = None,
    from_weights: Annotated[
        bool,
        typer.Option(
            "--from-weights", help="Propose one: groups of linear probes of like direction, under bounding probes."
        ),
    ] = False,
    threshold: Annotated[
        float | None, typer.Option(help="With --from-weights: the alert threshold of probes that have none.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The new pack: a folder that is not there yet; else PACK-tree, next to it. With --from-weights nothing"
                " is written without it."
            )
        ),
    ] = None,
    name: opt.PackName = "",
    as_json: opt.AsJson = False,
    overwrite: opt.OverwritePack = False,
) -> None:
    """Give a flat pack a hierarchy from a file, or see what one proposed from its weights would save."""
    from probemon.packs.hierarchies import propose, with_hierarchy

    if (tree is None) != from_weights:
        raise ConfigError("give either TREE.json or --from-weights")
    if threshold is not None and not from_weights:
        raise ConfigError("--threshold goes with --from-weights")
    if tree is not None:
        target = out or Path(f"{source.rstrip('/')}-tree")
        placed, outcome = with_hierarchy(
            _open(source), read_object(tree), target, name=name or None, overwrite=overwrite
        )
        fields = {key: getattr(outcome, key) for key in ("n_placed", "n_roots", "groups", "unnamed")}
        _report(outcome, {**fields, "out": str(target)}, as_json)
        if not as_json:
            _say_written(placed, str(target))
        return
    proposal = propose(_open(source), threshold=threshold)
    fields = {key: getattr(proposal, key) for key in ("n_tried", "share", "n_states", "states")}
    _report(proposal, {"n_groups": len(proposal.groups), **fields}, as_json)
    if out is not None:
        written = proposal.write(out, name=name or None, overwrite=overwrite)
        if not as_json:
            _say_written(written, str(out))


def quantize(source: opt.Pack, out: Out, as_json: opt.AsJson = False, overwrite: opt.OverwritePack = False) -> None:
    """Write an int8 copy of PACK (a scale for each row) and say how far its scores move."""
    from probemon.packs.quantize import quantize as quantize_pack

    before, target = _open(source), Path(out)
    after = quantize_pack(before, target, overwrite=overwrite)
    error = after.manifest["quality"]["int8"]
    if as_json:
        answer(
            {
                "directory": str(target),
                "weight_bytes": after.weight_bytes(),
                "source_weight_bytes": before.weight_bytes(),
                **error,
            }
        )
        return
    say(f"{target}: {after.weight_bytes() / 1e6:.2f} MB of weights, {before.weight_bytes() / 1e6:.2f} before")
    say(
        f"on {error['n_states']} {error['states']} states scores move by at most {error['max_score_error']:.2g},"
        f" {error['mean_score_error']:.2g} on average; of {error['n_fired']} that fired, {error['n_fired_changed']}"
        " changed",
    )


@pack.command()
def push(
    source: opt.Pack,
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Where to on the Hugging Face hub; created if missing.")
    ],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="For a repository that is made; else what its owner has set."),
    ] = None,
    revision: Annotated[str, typer.Option(help="A branch, created if missing; else main.")] = "",
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    as_json: opt.AsJson = False,
) -> None:
    """Push a pack to the Hugging Face hub, in one commit. Log in first, by hf auth login or HF_TOKEN."""
    opened = _open(source)
    pushed = opened.push_to_hub(
        repository, private=private, revision=revision or None, commit_message=message or None, create_pr=create_pr
    )
    if as_json:
        answer({name: getattr(pushed, name) for name in ("url", "commit", "manifest_sha256", "pull_request")})
        return
    say(f"pushed {opened.name} to {pushed.pull_request or pushed.url}")
    say(
        f'others can pin it: ProbePack.from_pretrained("{repository}", revision="{pushed.commit}",'
        f' manifest_sha256="{pushed.manifest_sha256}")'
    )
