"""The commands import hatcat, probelab, probekit, steerkit, saelens, hallucination, lie-detectors, repeng, safetensors.

    probemon import hatcat lens_packs/mine packs/mine --site resid_post.15 --normalize layernorm

Pickled objects are never opened: use `probemon.lab.importers.sklearn`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.common import progress_bar
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.packs.pack import ProbePack

importing = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Make a pack of another project's probes.",
)

SITES = (
    "resid_post.N, the output of block N, counted from 0; attn_out.N or mlp_out.N, the output of its attention or"
    " feed-forward part; ssm_state.N or delta.N, the state or the step of a recurrent layer."
)

Source = Annotated[Path, typer.Argument(metavar="SRC", help="Files of the other project.")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="Folder for the pack; must not exist.")]
Site = Annotated[str, typer.Option(help=f"Site of the model's hidden state: {SITES} Not in the files.")]
Normalize = Annotated[
    str,
    typer.Option(help="Normalisation of each state before the probes: none, layernorm or rmsnorm. Not in the files."),
]
Name = Annotated[str | None, typer.Option(help="Name of the pack. Default: that of its folder.")]
Licence = Annotated[str, typer.Option(help="Licence of the probes.")]
Model = Annotated[str | None, typer.Option(help="The model's name on the hub, if it is not in the files.")]
Sharpness = Annotated[
    float,
    typer.Option(
        help=(
            "Multiplies the logits, by 0.001 to 1000: under 1 keeps strong scores apart. It does not change where"
            " probes fire."
        )
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object: what was imported, with every note about it.")]

NOT_STATED = "not stated"


@importing.command()
def hatcat(
    source: Source,
    target: Target,
    site: Site,
    normalize: Normalize,
    hierarchy: Annotated[
        Path | None,
        typer.Option(help="hierarchy.json or a layer file, or their folder, if it is not SRC."),
    ] = None,
    flat: Annotated[
        bool, typer.Option("--flat", help="Leave all edges out: every probe is scored at every token.")
    ] = False,
    allow_unlisted: Annotated[
        bool, typer.Option("--allow-unlisted", help="Take a hierarchy that lacks more than a fifth of the probes.")
    ] = False,
    break_cycles: Annotated[
        bool, typer.Option("--break-cycles", help="Leave out the edges that close cycles, and list them.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            help=(
                "Number format of the pack's weights: float32, bfloat16, or auto, the widest of the files. States are"
                " rounded to it."
            )
        ),
    ] = "auto",
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import a lens or probe pack of HatCat: one state dict a concept, with or without its hierarchy."""
    from probemon.lab.importers.hatcat import import_pack

    with progress_bar("import", unit="probe") as bar:

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
    _report(pack, as_json, report.as_dict(), report.lines())


def _command_of_states(module: str, function: str) -> Callable[..., None]:

    def command(
        source: Source,
        target: Target,
        site: Site,
        normalize: Normalize,
        name: Name = None,
        licence: Licence = NOT_STATED,
        model: Model = None,
        overwrite: opt.OverwritePack = False,
        as_json: Json = False,
    ) -> None:
        import_probes = getattr(import_module(f"probemon.lab.importers.{module}"), function)
        options = {"name": name, "licence": licence, "model": model, "overwrite": overwrite}
        _report_manifest(import_probes(source, target, site=site, normalize=normalize, **options), as_json)

    return command


importing.command(
    "probelab", help="Import probes that probelab saved: a .pt file, or a folder of them, each named by its file."
)(_command_of_states("probelab", "import_files"))
importing.command("probekit", help="Import probes of probekit: a JSON file of their to_dict(), by name.")(
    _command_of_states("probekit", "import_file")
)


@importing.command()
def steerkit(
    source: Source,
    target: Target,
    scale: Annotated[
        float,
        typer.Option(
            help="Length of the fitted coefficients, which is not in the files; 1 if it is lost (with --no-bias)."
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="Which direction: logistic, diff_of_means or mass_mean. Default: the file's own.")
    ] = None,
    bias: Annotated[bool, typer.Option(help="Whether the bias of the fit is added.")] = True,
    name: Name = None,
    licence: Licence = NOT_STATED,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import probes of steerkit: a .safetensors file, or a folder of them. Layer and model are in the files."""
    from probemon.lab.importers.steerkit import import_files

    _report_manifest(
        import_files(
            source, target, scale=scale, method=method, bias=bias, name=name, licence=licence, overwrite=overwrite
        ),
        as_json,
    )


@importing.command()
def saelens(
    source: Source,
    target: Target,
    features: Annotated[str | None, typer.Option(help="Which features, by number: 3,17,100-120. Default: all.")] = None,
    names: Annotated[Path | None, typer.Option(help='Names of features: a JSON file, {"17": "cats"}.')] = None,
    site: Annotated[str | None, typer.Option(help=f"Site of the state, if it is not in cfg.json: {SITES}")] = None,
    centered: Annotated[
        bool | None,
        typer.Option(
            help=(
                "Whether states had their mean subtracted (TransformerLens with centred writing weights), if it"
                " is not in cfg.json."
            )
        ),
    ] = None,
    activation_scale: Annotated[
        float | None,
        typer.Option(help="The factor on states of 'expected_average_only_in', which is not in the files."),
    ] = None,
    sharpness: Sharpness = 1.0,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import features of a sparse autoencoder from the folder that SAELens saved. Each fires where it is active."""
    from probemon.lab.importers.saelens import import_sae

    model_option: dict[str, Any] = {"model": model} if model is not None else {}
    pack = import_sae(
        source,
        target,
        features=None if features is None else _ranges("--features", features),
        names=_labels(names),
        site=site,
        centered=centered,
        activation_scale=activation_scale,
        sharpness=sharpness,
        name=name,
        licence=licence,
        overwrite=overwrite,
        **model_option,
    )
    _report_manifest(pack, as_json)


@importing.command()
def hallucination(
    source: Source,
    target: Target,
    normalize: Normalize,
    concept: Annotated[str, typer.Option(help="Name of the concept.")] = "hallucination",
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import a hallucination head from the folder with probe_config.json and probe_head.bin."""
    from probemon.lab.importers.hallucination import import_head

    _report_manifest(
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


@importing.command("lie-detectors")
def lie_detectors(
    source: Source,
    target: Target,
    sharpness: Sharpness = 1.0,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import deception probes of lie-detectors (AISI): a .pt file, a folder of them, or a repository's folder."""
    from probemon.lab.importers.lie_detectors import import_lie_detectors

    options: dict[str, Any] = {"name": name, "licence": licence, "model": model, "overwrite": overwrite}
    _report_manifest(import_lie_detectors(source, target, sharpness=sharpness, **options), as_json)


@importing.command()
def repeng(
    source: Source,
    target: Target,
    layers: Annotated[str, typer.Option(help="Layers whose directions become probes, from 0: 12,16,20-24.")],
    sharpness: Sharpness = 1.0,
    n_layers: Annotated[int | None, typer.Option(help="Layers of the model, if files hold only some.")] = None,
    name: Name = None,
    licence: Licence = NOT_STATED,
    model: Model = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import control vectors of repeng: a .gguf file, or a folder of them. Each direction becomes a probe."""
    from probemon.lab.importers.repeng import import_control_vector

    options: dict[str, Any] = {"name": name, "licence": licence, "model": model, "overwrite": overwrite}
    pack = import_control_vector(
        source, target, layers=_ranges("--layers", layers), sharpness=sharpness, n_layers=n_layers, **options
    )
    _report_manifest(pack, as_json)


@importing.command()
def safetensors(
    source: Source,
    target: Target,
    mapping: Annotated[Path, typer.Option(help="A JSON file that assigns tensors to probes.")],
    site: Annotated[
        str | None,
        typer.Option(help=f"Site of the hidden state, for probes without one in the mapping: {SITES}"),
    ] = None,
    normalize: Annotated[str | None, typer.Option(help="none, layernorm or rmsnorm; overrides the mapping.")] = None,
    name: Name = None,
    overwrite: opt.OverwritePack = False,
    as_json: Json = False,
) -> None:
    """Import probes from any safetensors file, index of several or .npz, with a small mapping of yours."""
    from probemon.lab.importers.generic import import_safetensors

    _report_manifest(
        import_safetensors(
            source, target, mapping=mapping, site=site, normalize=normalize, name=name, overwrite=overwrite
        ),
        as_json,
    )


def _labels(path: Path | None) -> dict[int, str] | None:
    from probemon.lab.importers.foreign_files import read_json

    if path is None:
        return None
    content = read_json(path)
    if not isinstance(content, dict) or not all(
        isinstance(value, str) and _is_number(key) and key == str(int(key)) for key, value in content.items()
    ):
        raise ConfigError(f'{path}: expected an object of names by number of feature, such as {{"17": "cats"}}')
    return {int(key): value for key, value in content.items()}


def _ranges(option: str, text: str) -> Iterator[int]:
    ranges: list[range] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ConfigError(
                f"{option} {text!r}: {part.strip()!r} is neither a number nor a range: write 3,17,100-120"
            )
        ranges.append(range(int(first), int(last if dash else first) + 1))
        if not ranges[-1]:
            raise ConfigError(f"{option} {text!r}: {part.strip()!r} is backwards: write the smaller number first")
    return itertools.chain(*ranges)


def _is_number(piece: str) -> bool:
    return piece.isascii() and piece.isdigit() and len(piece) < 10


def _report_manifest(pack: ProbePack, as_json: bool) -> None:
    report = dict(pack.manifest["provenance"]["import"])
    inputs = f"read at {', '.join(pack.sites)}, normalised by {report['normalize']}"
    _report(pack, as_json, report, [f"imported from {report['source']}: {inputs}", *report["notes"]])


def _report(pack: ProbePack, as_json: bool, report: dict[str, Any], lines: list[str]) -> None:
    warning = str(report.get("warning", ""))
    if warning:
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
        f"{pack.directory}: {counted(pack.n_probes, 'probe')}, {pack.architecture}, {pack.manifest.get('dtype')},"
        f" {pack.weight_bytes() / 1e6:.2f} MB"
    )
    for line in lines:
        say(line)
    if bool(pack.alert_threshold.isnan().any()):
        say("Probes without an alert threshold never fire: probemon calibrate sets them to a rate of false alarms.")
