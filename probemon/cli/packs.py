"""The commands that make packs of packs.

probemon pack merge animals/ deception/ both/
probemon pack subset PACK whales/ --concept whale --concept "ship*"
probemon pack rename PACK mine/ --name mine --concepts names.json
probemon pack diff before/ after/
probemon pack push PACK org/name
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli.terminal import answer, say
from probemon.core.strict_json import RepeatedKey, loads
from probemon.errors import ConfigError

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

pack = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Make packs of packs: merge, subset, rename; diff; and push.",
)

_MAX_JSON_BYTES = 64 << 20
_NEW = "The new pack: a folder that is not there yet."
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a pack that is there.")]


@pack.command()
def merge(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="PACK PACK ... OUT", help="Two packs or more, then the folder of the new one."),
    ],
    name: Annotated[str, typer.Option(help="Name of the new pack; else that of its folder.")] = "",
    prefix: Annotated[bool, typer.Option("--prefix", help="Put each pack's name before its ids, as name:id.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """One pack of the probes of several packs for one host."""
    from probemon.packs.edit import merge as merge_packs

    if len(folders) < 3:
        raise ConfigError(f"{len(folders)} folders: give two packs or more, and the folder of the new one last")
    *sources, out = folders
    packs = [_open(source) for source in sources]
    named = {one.name: one for one in packs}
    if prefix and len(named) < len(packs):
        raise ConfigError(
            "two of the packs have one name: rename one first, by probemon pack rename PACK OUT --name NAME"
        )
    _said(merge_packs(named if prefix else packs, out, name=name or Path(out).name, overwrite=overwrite), out)


@pack.command()
def subset(
    source: Annotated[str, typer.Argument(metavar="PACK", help="A pack: a folder, or a hub name.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help=_NEW)],
    concept: Annotated[
        list[str],
        typer.Option(help="A concept to keep: an id, a name, or a pattern such as 'ship*'. May be given again."),
    ],
    above: Annotated[bool, typer.Option("--above/--no-above", help="Keep all concepts above them.")] = True,
    below: Annotated[bool, typer.Option("--below/--no-below", help="Keep all concepts below them.")] = True,
    name: Annotated[str, typer.Option(help="Name of the new pack.")] = "",
    overwrite: Overwrite = False,
) -> None:
    """A pack of some concepts, with what is above and below them."""
    from probemon.packs.edit import subset as cut

    _said(cut(_open(source), out, concept, above=above, below=below, name=name or None, overwrite=overwrite), out)


@pack.command()
def rename(
    source: Annotated[str, typer.Argument(metavar="PACK", help="A pack: a folder, or a hub name.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help=_NEW)],
    name: Annotated[str, typer.Option(help="New name of the pack.")] = "",
    concepts: Annotated[
        Path | None, typer.Option(help='A JSON file: by id, a new name, or {"id": ..., "name": ...}.')
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """The same pack by other names."""
    from probemon.packs.edit import rename as renamed

    _said(
        renamed(
            _open(source),
            out,
            name=name or None,
            concepts=None if concepts is None else read_object(concepts),
            overwrite=overwrite,
        ),
        out,
    )


@pack.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A pack.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, with every concept that differs.")] = False,
) -> None:
    """What differs between two packs, concept by concept. Exit status 1 where anything does."""
    from probemon.packs.diff import pack_diff

    found = pack_diff(_open(a), _open(b))
    _tell(found, found.as_dict(), as_json)
    if not found.same:
        raise typer.Exit(1)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ConfigError`."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes, at most {_MAX_JSON_BYTES:,} are read")
        found = loads(path.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except RepeatedKey as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({str(error)[:200]})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}: give a JSON object")
    return found


def _open(source: str) -> ProbePack:
    from probemon.packs.pack import ProbePack

    return ProbePack.from_pretrained(source)


def _tell(outcome: object, stated: dict[str, Any], as_json: bool) -> None:
    if as_json:
        answer(stated)
    else:
        say(*str(outcome).split("\n"))


def _said(made: ProbePack, out: str) -> None:
    say(f"wrote {out}: {made.name}, {made.n_probes} probes, {made.architecture}, {made.weight_bytes() / 1e6:.1f} MB")


def hierarchy(
    source: Annotated[str, typer.Argument(metavar="PACK", help="A pack: a folder, or a hub name.")],
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
                "The new pack: a folder that is not there yet; else PACK-tree, beside it. With --from-weights nothing"
                " is written without it."
            )
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the new pack.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Give a flat pack a hierarchy from a file, or see what one proposed from its weights would save."""
    from probemon.packs.hierarchies import propose, with_hierarchy

    if (tree is None) != from_weights:
        raise ConfigError("give either TREE.json or --from-weights")
    if threshold is not None and not from_weights:
        raise ConfigError("--threshold goes with --from-weights")
    if tree is not None:
        target = out or Path(f"{source.rstrip('/')}-tree")
        made, told = with_hierarchy(_open(source), read_object(tree), target, name=name or None, overwrite=overwrite)
        stated = {
            "n_placed": told.n_placed,
            "n_roots": told.n_roots,
            "groups": told.groups,
            "unnamed": told.unnamed,
            "out": str(target),
        }
        _tell(told, stated, as_json)
        if not as_json:
            _said(made, str(target))
        return
    proposal = propose(_open(source), threshold=threshold)
    stated = {
        "n_groups": len(proposal.groups),
        "n_tried": proposal.n_tried,
        "share": proposal.share,
        "n_states": proposal.n_states,
        "states": proposal.states,
    }
    _tell(proposal, stated, as_json)
    if out is not None:
        written = proposal.write(out, name=name or None, overwrite=overwrite)
        if not as_json:
            _said(written, str(out))


@pack.command()
def push(
    source: Annotated[str, typer.Argument(metavar="PACK", help="A pack: a folder, or a hub name.")],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="Where to on the Hugging Face hub; made where there is none.")
    ],
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Of a repository that is made; else what its owner has set."),
    ] = None,
    revision: Annotated[str, typer.Option(help="A branch, made where there is none; else main.")] = "",
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Push a pack to the Hugging Face hub, in one commit. Log in first, by hf auth login or HF_TOKEN."""
    opened = _open(source)
    made = opened.push_to_hub(
        repository, private=private, revision=revision or None, commit_message=message or None, create_pr=create_pr
    )
    if as_json:
        answer(
            {
                "url": made.url,
                "commit": made.commit,
                "manifest_sha256": made.manifest_sha256,
                "pull_request": made.pull_request,
            }
        )
        return
    say(f"pushed {opened.name} to {made.pull_request or made.url}")
    say(
        f'others can pin it: ProbePack.from_pretrained("{repository}", revision="{made.commit}",'
        f' manifest_sha256="{made.manifest_sha256}")'
    )
