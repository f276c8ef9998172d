"""The commands import hatcat, probelab, probekit, steerkit, saelens, hallucination, safetensors.

    probemon import hatcat lens_packs/mine packs/mine --site resid_post.15 --normalize layernorm
    probemon import safetensors heads.safetensors packs/heads --mapping heads.json

Pickled objects (scikit-learn's among them) are never opened: load them yourself and use `probemon.importers.sklearn`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total_fmt} {unit} [{elapsed}<{remaining}]"

importing = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Make a pack of another project's probes.",
)

SITES = (
    "resid_post.N, the output of block N, counted from 0; attn_out.N or mlp_out.N, what its attention or feed-forward"
    " part gives."
)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="What the other project wrote.")]
Target = Annotated[
    Path, typer.Argument(metavar="DST", help="Where the pack is written: a folder that is not there yet.")
]
Site = Annotated[str, typer.Option(help=f"Where the host's state is read: {SITES} No file says it.")]
Normalize = Annotated[
    str,
    typer.Option(
        help="What was done to each state before the probes saw it: none, layernorm or rmsnorm. No file says it."
    ),
]
Name = Annotated[str | None, typer.Option(help="Of the pack. Default: of its folder.")]
Licence = Annotated[str, typer.Option(help="Of the probes.")]
Model = Annotated[str | None, typer.Option(help="The host's name on the hub, where the files do not say it.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a pack that is there.")]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object: what was imported, and all that is to be said of it.")
]

NOT_STATED = "not stated"


@importing.command()
def hatcat(
    source: Source,
    target: Target,
    site: Site,
    normalize: Normalize,
    hierarchy: Annotated[
        Path | None,
        typer.Option(help="hierarchy.json or a layer file, or the folder that holds them, where it is not SRC."),
    ] = None,
    flat: Annotated[
        bool, typer.Option("--flat", help="Leave all edges out: every probe is scored at every token.")
    ] = False,
    allow_unlisted: Annotated[
        bool, typer.Option("--allow-unlisted", help="Take a hierarchy that lacks more than a fifth of the probes.")
    ] = False,
    break_cycles: Annotated[
        bool, typer.Option("--break-cycles", help="Leave out the edges of a hierarchy that lead back, and say which.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the pack's weights: float32, bfloat16, or auto, the widest of the files. States are rounded to it."
        ),
    ] = "auto",
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """A lens or probe pack of HatCat: one state dict a concept, with or without its hierarchy."""
    from tqdm import tqdm

    from probemon.importers.hatcat import import_pack

    with tqdm(unit="probe", desc="import", disable=None, dynamic_ncols=True, bar_format=_BAR) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        pack, report = import_pack(
            source,
            target,
            site=site,
            normalize=normalize,
            hierarchy=hierarchy,
            flat=flat,
            allow_unlisted=allow_unlisted,
            break_cycles=break_cycles,
            dtype=dtype,
            name=name,
            licence=licence,
            model=model,
            overwrite=overwrite,
            progress=progress,
        )
    _tell(pack, as_json, report.as_dict(), report.lines())


@importing.command()
def probelab(
    source: Source,
    target: Target,
    site: Site,
    normalize: Normalize,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Probes that probelab saved: a .pt file, or a folder of them, each named by its file."""
    from probemon.importers.probelab import import_files

    _done(
        import_files(
            source, target, site=site, normalize=normalize, name=name, licence=licence, model=model, overwrite=overwrite
        ),
        as_json,
    )


@importing.command()
def probekit(
    source: Source,
    target: Target,
    site: Site,
    normalize: Normalize,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Probes of probekit: a JSON file of their to_dict(), by name."""
    from probemon.importers.probekit import import_file

    _done(
        import_file(
            source, target, site=site, normalize=normalize, name=name, licence=licence, model=model, overwrite=overwrite
        ),
        as_json,
    )


@importing.command()
def steerkit(
    source: Source,
    target: Target,
    scale: Annotated[
        float,
        typer.Option(
            help="Length of the fitted coefficients, which the files do not hold; 1 where it is lost (with --no-bias)."
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="Which direction: logistic, diff_of_means or mass_mean. Default: the file's own.")
    ] = None,
    bias: Annotated[bool, typer.Option(help="Whether the bias of the fit is added.")] = True,
    name: Name = None,
    licence: Licence = NOT_STATED,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Probes of steerkit: a .safetensors file, or a folder of them. Layer and host are in the files."""
    from probemon.importers.steerkit import import_files

    _done(
        import_files(
            source, target, scale=scale, method=method, bias=bias, name=name, licence=licence, overwrite=overwrite
        ),
        as_json,
    )


@importing.command()
def saelens(
    source: Source,
    target: Target,
    features: Annotated[str | None, typer.Option(help="Which, by number: 3,17,100-120. Default: all.")] = None,
    names: Annotated[Path | None, typer.Option(help='Names of features: a JSON file, {"17": "cats"}.')] = None,
    site: Annotated[
        str | None, typer.Option(help=f"Where the state is read, where cfg.json does not say it: {SITES}")
    ] = None,
    centered: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Whether states had their mean subtracted (TransformerLens with centred writing weights), where"
                " cfg.json does not say."
            )
        ),
    ] = None,
    activation_scale: Annotated[
        float | None, typer.Option(help="The factor on states of 'expected_average_only_in', which no file holds.")
    ] = None,
    sharpness: Annotated[
        float,
        typer.Option(
            help=(
                "Multiplies the logits, by 0.001 to 1000: under 1 keeps strong activations apart. Where probes fire"
                " does not change."
            )
        ),
    ] = 1.0,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Features of a sparse autoencoder: the folder that SAELens saved. Each fires where the feature is active."""
    from probemon.importers.saelens import import_sae
    from probemon.importers.sources import read_json

    labels = None
    if names is not None:
        read = read_json(names)
        if not isinstance(read, dict) or not all(
            isinstance(value, str) and key.isascii() and key.isdigit() for key, value in read.items()
        ):
            raise ConfigError(f'{names}: expected an object of names by number of feature, such as {{"17": "cats"}}')
        labels = {int(key): value for key, value in read.items() if len(key) < 10}
    more: dict[str, Any] = {"model": model} if model is not None else {}
    pack = import_sae(
        source,
        target,
        features=_numbers(features),
        names=labels,
        site=site,
        centered=centered,
        activation_scale=activation_scale,
        sharpness=sharpness,
        name=name,
        licence=licence,
        overwrite=overwrite,
        **more,
    )
    _done(pack, as_json)


@importing.command()
def hallucination(
    source: Source,
    target: Target,
    normalize: Normalize,
    concept: Annotated[str, typer.Option(help="What to call it.")] = "hallucination",
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """A hallucination head: the folder with probe_config.json and probe_head.bin."""
    from probemon.importers.hallucination import import_head

    _done(
        import_head(
            source,
            target,
            concept=concept,
            normalize=normalize,
            name=name,
            licence=licence,
            model=model,
            overwrite=overwrite,
        ),
        as_json,
    )


@importing.command()
def safetensors(
    source: Source,
    target: Target,
    mapping: Annotated[Path, typer.Option(help="A JSON file that says which tensors make up which probe.")],
    site: Annotated[
        str | None, typer.Option(help=f"Before what the mapping says of where the host's state is read: {SITES}")
    ] = None,
    normalize: Annotated[
        str | None, typer.Option(help="none, layernorm or rmsnorm; before what the mapping says.")
    ] = None,
    name: Name = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Probes in any safetensors file, with a small mapping of yours."""
    from probemon.importers.generic import import_safetensors

    _done(
        import_safetensors(
            source, target, mapping=mapping, site=site, normalize=normalize, name=name, overwrite=overwrite
        ),
        as_json,
    )


def _numbers(text: str | None) -> Iterator[int] | None:
    """`3,17,100-120` as numbers. Raises `ConfigError`."""
    if text is None:
        return None
    found: list[range] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not (first.isascii() and first.isdigit() and len(first) < 10) or (
            dash and not (last.isascii() and last.isdigit() and len(last) < 10)
        ):
            raise ConfigError(f"--features {text!r}: {part.strip()!r} is no number and no range: write 3,17,100-120")
        found.append(range(int(first), (int(last) if dash else int(first)) + 1))
        if not found[-1]:
            raise ConfigError(f"--features {text!r}: {part.strip()!r} is backwards: write the smaller number first")
    return itertools.chain(*found)


def _done(pack: ProbePack, as_json: bool) -> None:
    """Tell of a pack whose import is all in its manifest."""
    report = dict(pack.manifest["provenance"]["import"])
    given = f"read at {', '.join(pack.sites)}, normalised by {report['normalize']}"
    _tell(pack, as_json, report, [f"imported from {report['source']}: {given}", *report["notes"]])


def _tell(pack: ProbePack, as_json: bool, report: dict[str, Any], lines: list[str]) -> None:
    warning = str(report.get("warning", ""))
    if warning:  # before all else
        say(f"warning: {warning}", error=as_json)
    if as_json:
        answer(
            {
                "directory": str(pack.directory),
                "name": pack.name,
                "n_probes": pack.n_probes,
                "architecture": str(pack.architecture),
                "dtype": pack.manifest.get("dtype"),
                "weight_bytes": pack.weight_bytes(),
                "inputs": pack.manifest["inputs"],
                "n_alert_thresholds": int((~pack.alert_threshold.isnan()).sum()),
                "report": report,
            }
        )
        return
    say(
        f"{pack.directory}: {pack.n_probes} probes, {pack.architecture}, {pack.manifest.get('dtype')},"
        f" {pack.weight_bytes() / 1e6:.2f} MB"
    )
    for line in lines:
        say(line)
    if bool(pack.alert_threshold.isnan().any()):
        say("Probes without an alert threshold never fire: probemon calibrate sets them to a rate of false alarms.")
