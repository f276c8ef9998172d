"""The command states.

probemon states demo mails.jsonl --sites resid_post.15 --out states/
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.common import bytes_of, load_aloud, progress_bar, use_threads
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.host.chat_dates import CHAT_DATE, parse_date
from probemon.util.counted import counted


def states(
    model: opt.Model,
    data: Annotated[
        list[str],
        typer.Argument(metavar="DATA", help="Texts, with labels or without: .jsonl, .csv, .tsv, .parquet or .yaml."),
    ],
    out: Annotated[
        Path,
        typer.Option(help="Folder for the states. Unfinished states of the same texts are continued."),
    ],
    sites: Annotated[
        str,
        typer.Option(
            help="States to write: resid_post.15, or several, as resid_post.8,mlp_out.9; of a recurrent layer"
            " ssm_state.3 or delta.3."
        ),
    ],
    on: opt.On = None,
    exclusive: Annotated[
        bool,
        typer.Option(
            "--exclusive", help="A text has the labels it lists, and no other concept; else others are unknown."
        ),
    ] = False,
    budget: Annotated[
        float, typer.Option(help="Size of the states at most, in GB: then tokens are drawn. 0: all of them.")
    ] = 0.0,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write states.parquet too: a row a token, with its characters and labels.")
    ] = False,
    text_field: opt.TextField = "text",
    chat_format: opt.ChatFormat = "",
    encoding: opt.Encoding = "utf-8",
    seed: Annotated[int, typer.Option(help="Draws the same tokens as any run with this number.")] = 0,
    chat_date: opt.ChatDate = CHAT_DATE,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Write the hidden states of DATA in MODEL to files, token by token, with labels: for your own trainer."""
    from probemon.core.probes import as_site, check_sites_once, parse_site
    from probemon.lab.training.collect import TABLE, collect
    from probemon.lab.training.examples import read_examples

    chosen = [as_site(site.strip()) for site in sites.split(",") if site.strip()]
    for site in chosen:
        parse_site(site)
    if not chosen:
        raise ConfigError("--sites is empty: give one, such as resid_post.15")
    check_sites_once(chosen)
    most_bytes = bytes_of(budget) or None
    parse_date(chat_date)
    use_threads(threads)
    # Errors show before the model is loaded.
    examples = read_examples(
        data, exclusive=exclusive, text_field=text_field, labelled=False, shape=chat_format, encoding=encoding
    )
    watched_model, tokenizer = load_aloud(model, device, dtype, reads_texts=True)
    with progress_bar("states", unit="token") as bar:
        result = collect(
            watched_model,
            tokenizer,
            examples,
            out,
            sites=chosen,
            roles=tuple(on or ("assistant",)),
            budget=most_bytes,
            seed=seed,
            chat_date=chat_date,
            progress=bar.update,
        )
    widths = {site: kind.width for site, kind in result.store.kinds.items()}
    if parquet:
        result.write_parquet(out / TABLE)
    if as_json:
        answer(
            {
                "directory": str(out),
                "sites": list(result.store.sites),
                "concepts": result.concepts,
                "texts": len(result.store.first),
                "rows": len(result.document),
                "left_out": result.left_out,
                "widths": widths,
            }
        )
        return
    say(
        f"{out}: states of {counted(len(result.document), 'token')} of {counted(len(result.store.first), 'text')} at"
        f" {', '.join(f'{site} ({width} values each)' for site, width in widths.items())}, in safetensors"
    )
    if result.left_out:
        say(
            f"the budget had no room for {counted(result.left_out, 'token')} more: the written"
            " ones were drawn at random"
        )
    say("labels, characters and groups of the tokens in tokens.safetensors, the texts in texts.jsonl")
