"""Arguments and options of several commands, as parameter types.

from probemon.cli import options as opt

def command(model: opt.Model, device: opt.Device = "cpu") -> None: ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

PROMPT = "Tell me about whales and the ships that hunted them."

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model folder, a hub name, or 'demo' for the bundled SmolLM2-135M-Instruct."
    ),
]
_PACK = "A probe pack: a folder, a hub name, or 'demo' for the one that comes with probemon"
Pack = Annotated[str, typer.Argument(metavar="PACK", help=f"{_PACK}.")]
PackOfModel = Annotated[
    str | None, typer.Argument(metavar="PACK", help=f"{_PACK}. It may be left out if MODEL is demo.")
]
MorePacks = Annotated[
    list[str] | None,
    typer.Option(
        "--pack",
        metavar="PACK",
        help=(
            "Another pack, alongside PACK in one run; may be repeated. NAME=PACK gives one a name of your choice, if"
            " two have the same."
        ),
    ),
]

Prompt = Annotated[str, typer.Option(help="What to say to the model.")]
MaxNewTokens = Annotated[int, typer.Option(help="Tokens to generate.")]
Plain = Annotated[bool, typer.Option("--plain", help="One line a token, for pipes (the default without a terminal).")]

Sample = Annotated[bool, typer.Option("--sample", help="Draw tokens instead of taking the most likely one.")]
Temperature = Annotated[float | None, typer.Option(help="With --sample: below 1 likely tokens are likelier still.")]
TopP = Annotated[
    float | None, typer.Option(help="With --sample: draw from the most likely tokens that make up this share.")
]
Seed = Annotated[int | None, typer.Option(help="Draw the same tokens as any run with this number.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system prompt, before the prompt.")]
OnlyConcepts = Annotated[
    list[str] | None,
    typer.Option(
        "--concept",
        metavar="CONCEPT",
        help="Show this concept (or a text with *) and what is below it, and no others; may be repeated.",
    ),
]
MinStrength = Annotated[
    float, typer.Option(help="Show what is so much over its alert threshold: 2 is odds seven times as high.")
]
StopOn = Annotated[
    list[str] | None,
    typer.Option(
        metavar="CONCEPT",
        help=(
            "Stop when the concept fires in generated text; CONCEPT:STRENGTH, when it is so much over its"
            " threshold; CONCEPT:above=SCORE, over a score of your own. May be repeated."
        ),
    ),
]
StopAggregate = Annotated[
    str,
    typer.Option(
        "--aggregate",
        help=(
            "The score that --stop-on compares: none (each token's), or the running score that the pack was trained or"
            " calibrated for, such as ema:0.3."
        ),
    ),
]
ScoresOut = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the scores of every token here, one JSON object a line."),
]

DeploymentFile = Annotated[
    Path | None,
    typer.Option(
        "--deployment",
        metavar="FILE",
        help="A file that says what to watch and what follows (see probemon deploy check), instead of PACK.",
    ),
]

Device = Annotated[str, typer.Option(help="Where model and probes run: cpu, cuda, ...")]
ChatDate = Annotated[
    str,
    typer.Option(
        help="The day, as YYYY-MM-DD, that chats are rendered with if the model's template writes today's date."
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads for the model; 0: what torch chooses.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Number format of the model: bfloat16, float32, float16 or auto (that of its files; float32 for demo)."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a model that is not the one the pack was made for.")]
AlertSet = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The pack's set of alert thresholds to use; by default the one it recommends.",
    ),
]
AuditRate = Annotated[
    float,
    typer.Option(help="Share of the tokens on which every probe is evaluated too, to count what the descent missed."),
]

WindowTokens = Annotated[
    int, typer.Option("--window", help="Longest input of the model in tokens; 0: 1024, or fewer if it takes fewer.")
]
Overlap = Annotated[
    int, typer.Option(help="Tokens that the windows of a long document share; -1: an eighth of a window.")
]
TextField = Annotated[str, typer.Option(help="Name of the text in JSON lines and parquet.")]
IdField = Annotated[str, typer.Option(help="Name of the document's id in JSON lines and parquet.")]

ChatFormat = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="FORM",
        help="The form of chats, such as ShareGPT or 'OpenAI messages'. Default: recognised row by row.",
    ),
]
Encoding = Annotated[
    str, typer.Option(help="Encoding of texts without a byte order mark: utf-8, latin-1, cp1252, utf-16-le, ...")
]
On = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PART",
        help="The part of a chat that counts: assistant, user, system, developer, tool or reasoning; may be repeated.",
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
JsonBesideView = Annotated[
    bool, typer.Option("--json", help="One JSON object on standard output; the view goes to standard error.")
]
OverwritePack = Annotated[bool, typer.Option("--overwrite", help="Replace an existing pack.")]
PackName = Annotated[str, typer.Option("--name", help="Name of the new pack.")]
