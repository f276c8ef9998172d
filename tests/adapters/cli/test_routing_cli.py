"""The command `probemon routing` on a mixture of experts and a BEM adapter: lines, JSON and live frames."""

import io
import json
import re
import sys

import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from arrangements import tokenizer
from conftest import make_model
from probemon.adapters.cli.routing_view import LiveRouting, PlainRouting, load_bars, summary
from probemon.adapters.ltm import LtmConfig, LtmForCausalLM
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.alerts import AlertRule
from probemon.cli import app as command_line
from recurrent_hosts import make_host
from routed_hosts import GREEDY, PROMPT, make_bem, make_moe

SAY = "w1 w44 w3 w17 w8"


@pytest.fixture
def run(capsys, monkeypatch):
    def routing(*arguments):
        monkeypatch.setattr(sys, "argv", ["probemon", "routing", *arguments])
        with pytest.raises(SystemExit) as exit:
            command_line.main()
        told = capsys.readouterr()
        return exit.value.code, told.out, told.err

    return routing


def saved(model, folder):
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(make_moe(), tmp_path_factory.mktemp("models") / "mixtral")


def test_plain_lines_and_json_describe_a_tiny_mixture_of_experts(folder, tmp_path, run):
    out = tmp_path / "routing.parquet"
    code, text, errors = run(
        folder, "--prompt", SAY, "--max-new-tokens", "6", "--json", "--window", "4", "--out", str(out)
    )
    assert code == 0, errors
    lines, result = errors.splitlines(), json.loads(text)
    assert (
        result["n_tokens"] == 10
        and result["generated_tokens"] == 6
        and [s["site"] for s in result["streams"]] == ["router.0", "router.1", "router.2"]
    )
    assert all(sum(stream["load"]) == 20 and stream["n_tokens"] == 10 for stream in result["streams"])
    assert result["latency_us"]["p99"] >= result["latency_us"]["p50"] > 0 and result["memory_watermark_bytes"] > 1e6
    tokens = [line for line in lines if line.lstrip()[:1].isdigit() and "; router.1 " in line]
    assert [int(line.split()[0]) for line in tokens] == list(range(10)) and [
        line.split()[1] for line in tokens[:5]
    ] == SAY.split()
    assert any("MaxVio" in line and "not finite" not in line for line in lines) and any(
        "capture of a decision" in line for line in lines
    )
    assert "\x1b" not in text
    table = pq.read_table(out).to_pylist()
    assert len(table) == 30
    model = make_moe()
    with torch.no_grad():
        oracle = model(torch.tensor([[1, 44, 3, 17, 8]]), output_router_logits=True).router_logits[2]
    assert [line["top_idx"][0] for line in table if line["layer"] == 2][:5] == oracle.argmax(dim=1).tolist()


def test_memory_slot_reads_name_the_token_that_is_read(tmp_path, run):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "memory_dim": 8, "segment_size": 4}
    folder = saved(LtmForCausalLM(LtmConfig(vocab_size=len(tokenizer()), memory_slots=5, **sizes)), tmp_path / "ltm")
    code, text, errors = run(folder, "--prompt", f"{SAY} {SAY}", "--max-new-tokens", "2", "--json", "--plain")
    assert code == 0, errors
    (stream,) = json.loads(text)["streams"]
    assert stream["source"] == "memory" and stream["n_tokens"] == 11
    ids = [1, 44, 3, 17, 8] * 2
    first, *_, last = (line for line in errors.splitlines() if " memory.1 " in line)
    assert first.endswith("nothing (1.00), entropy 0.00")  # no segment has ended: the null slot
    named = re.findall(r"slot \d: token (\d+) at (\d+)", last)
    assert len(named) == 4 and all(ids[int(position)] == int(token) for token, position in named)


def test_recurrent_layers_are_shown_with_their_look_back(tmp_path, run):
    host = make_host("mamba2", vocab_size=len(tokenizer()))
    folder = saved(host, tmp_path / "mamba2")
    arguments = (folder, "--prompt", f"{SAY} {SAY}", "--max-new-tokens", "3", "--json", "--plain")
    code, text, errors = run(*arguments, "--states")
    assert code == 0, errors
    result, lines = json.loads(text), errors.splitlines()
    with RoutingMonitor(host, states=True) as monitor:
        host.generate(torch.tensor([[1, 44, 3, 17, 8] * 2]), max_new_tokens=3, do_sample=False)
    assert result["states"] == monitor.report()["states"] and result["streams"] == [] and result["n_tokens"] == 12
    assert result["unjudged"] == {"short": 512, "full": 512, "at limit": 512, "grows": 1025}
    tokens = [line for line in lines if " holds " in line]
    assert [int(line.split()[0]) for line in tokens] == list(range(12)) and "ssm.1 holds " in tokens[0]
    assert tokens[0].split("ssm.0 ")[1].startswith("holds 1.0;")  # the first token holds itself
    assert any(line.split()[:1] == ["layer"] and "half-life" in line and "norm" in line for line in lines)
    assert "0 routers, 2 recurrent layers watched" in errors.replace("\n", " ")
    code, _, errors = run(*arguments, "--out", str(tmp_path / "decisions.jsonl"))
    assert code == 2 and "--out is for decisions of routers" in errors and not (tmp_path / "decisions.jsonl").exists()


def test_live_frame_shows_the_text_and_the_layers():
    console = Console(record=True, width=100, height=30, force_terminal=True, file=io.StringIO())
    with RoutingMonitor(host := make_host("mamba2")) as monitor, LiveRouting(console, title="states") as view:
        monitor.recurrent.listen(
            lambda row, placed, told: view.show_states(lambda p: f"t{p} ", placed, told, monitor.report)
        )
        host.generate(torch.tensor([[1, 44, 3]]), max_new_tokens=3, do_sample=False)
    text = console.export_text()
    assert "t0 t1 t2 t3 t4 " in text and all(word in text for word in ("half-life", "ssm.0", "ssm.1"))


def test_codes_of_a_bem_adapter_are_shown(tmp_path, run):
    model = make_model()
    with make_bem(model) as bem:
        bem.save_pretrained(tmp_path / "adapter")
    host = saved(model, tmp_path / "host")
    code, text, errors = run(
        host, "--bem", str(tmp_path / "adapter"), "--prompt", SAY, "--max-new-tokens", "4", "--json", "--plain"
    )
    assert code == 0, errors
    lines, result = errors.splitlines(), json.loads(text)
    assert [stream["level"] for stream in result["streams"]] == ["chunk", "token"] and all(
        stream["n_tokens"] == 8 for stream in result["streams"]
    )
    assert any("bem chunk" in line and "reused" in line for line in lines) and any("rank" in line for line in lines)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--prompt", " "], "the prompt is empty"),
        (["--max-new-tokens", "0"], "give 1 or more"),
        (["--out", "x.csv"], "ends with .jsonl or .parquet"),
        (["--device", "nowhere"], "nowhere"),
    ],
)
def test_invalid_input_is_one_error_line(folder, arguments, message, run):
    code, _, error = run(folder, *arguments)
    assert code == 2 and message in error and len(error.splitlines()) == 1


def test_existing_output_file_is_kept_and_reported_in_one_line(folder, tmp_path, run):
    (tmp_path / "r.jsonl").write_text("mine")
    code, _, error = run(folder, "--prompt", SAY, "--out", str(tmp_path / "r.jsonl"))
    assert (
        code == 2
        and len(error.splitlines()) == 1
        and "give another name, or remove it first" in error
        and "overwrite" not in error
    )
    assert (tmp_path / "r.jsonl").read_text() == "mine"


def test_few_nonfinite_tokens_raise_an_alert(tmp_path, run):
    model = make_moe()
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight[0] = float("nan")
    code, text, errors = run(
        saved(model, tmp_path / "broken"), "--prompt", SAY, "--max-new-tokens", "2", "--json", "--plain"
    )
    assert code == 0, errors
    lines, result = errors.splitlines(), json.loads(text)
    assert (
        result["n_tokens"] == 6
        and [alert.split(",")[0] for alert in result["alerts"]] == ["not finite: router.2"]
        and "not finite" not in result["unjudged"]
    )
    assert any(line.startswith("alert: not finite: router.2") for line in lines)
    heading = next(line for line in lines if "MaxVio" in line)
    shown = {
        site: next(line for line in lines if line.startswith(f"{site} ") and "(" not in line)
        for site in ("router.0", "router.2")
    }
    assert "not finite" in heading and shown["router.2"].split()[-2] == "6" and shown["router.0"].split()[-2] == "0"


def test_model_without_routers_is_one_error_line(tmp_path, run):
    code, _, error = run(saved(make_model(), tmp_path / "llama"))
    assert code == 2 and "no router that is known" in error


def test_the_live_frame_shows_text_routers_and_alerts():
    console = Console(record=True, width=120, height=30, force_terminal=True, file=io.StringIO())
    view = LiveRouting(console, title="a model routing")
    model = make_moe()
    with view, RoutingMonitor(model, window=4) as monitor:
        monitor.listen(
            lambda placed, decisions, record: view.show(lambda position: f"<{position}>", record, monitor.report)
        )
        model.generate(PROMPT, **GREEDY)
    console.print(
        view.render({**monitor.report(), "alerts": ["collapse: router.1, spread 0.1 (threshold 0.2) at token 512"]})
    )
    frame = console.export_text()
    last = frame[frame.rindex("a model routing") :]
    assert "".join(f"<{i}>" for i in range(12)) in last.replace("\n", "") and "router.0" in last and "router.2" in last
    assert "decision" in last and "MaxVio" in last and "12 tokens" in last and "collapse: router.1" in last
    streams = monitor.report()["streams"]
    assert f"{streams[1]['decision_entropy']:.2f}" in last and load_bars(streams[1]["load"]).plain in last


def test_router_numbers_stay_whole_if_bars_do_not_fit():
    model = make_moe()
    with RoutingMonitor(model, window=4) as monitor:
        model.generate(PROMPT, **GREEDY)
    streams = [{**stream, "load": [1 / 64] * 64} for stream in monitor.report()["streams"]]  # of so many experts
    rows = {}
    for width in (80, 200):
        console = Console(record=True, width=width, file=io.StringIO())
        summary(console, {**monitor.report(), "streams": streams})
        lines = console.export_text().splitlines()
        rows[width] = [line.split() for line in lines if line.startswith("router.")]
    assert len(rows[80]) == len(streams) and rows[80] != rows[200]
    assert [row[:-1] for row in rows[80]] == [row[:-1] for row in rows[200]]


def test_the_live_frame_of_an_adapter_shows_its_codes():
    console = Console(record=True, width=120, height=30, force_terminal=True, file=io.StringIO())
    view = LiveRouting(console, title="an adapter routing")
    model = make_model()
    with make_bem(model) as bem, view, RoutingMonitor(model, bem=bem, window=4) as monitor:
        monitor.listen(
            lambda placed, decisions, record: view.show(lambda position: f"<{position}>", record, monitor.report)
        )
        model.generate(PROMPT, **GREEDY)
    report = monitor.report()
    console.print(view.render(report))
    frame = console.export_text()
    last = frame[frame.rindex("an adapter routing") :]
    assert (
        "".join(f"<{i}>" for i in range(report["n_tokens"])) in last.replace("\n", "")
        and f"{report['n_tokens']} tokens" in last
    )
    lines = {
        stream["level"]: next(line for line in last.splitlines() if f" {stream['level']} " in line)
        for stream in report["streams"]
    }
    assert set(lines) == {"chunk", "token"}
    for stream in report["streams"]:
        for figure in (
            f"{stream['code_norm']:.2f}",
            f"{stream['confidence']:.2f}",
            f"{stream['effective_rank']:.1f}",
            f"{stream['code_reuse_rate']:.1%}",
            load_bars(stream["variances"]).plain,
        ):
            assert figure in lines[stream["level"]].split("│")[1], (figure, lines)


def test_frames_fit_a_small_terminal_and_say_what_they_omit():
    console = Console(record=True, width=100, height=16, force_terminal=True, file=io.StringIO())
    report = {
        "n_tokens": 5,
        "n_unseen": 0,
        "latency_us": {"p50": 1.0},
        "memory_watermark_bytes": 10**7,
        "alerts": [],
        "unjudged": {},
        "states": {},
        "streams": [
            {
                "source": "moe",
                "site": f"router.{i}",
                "layer": i,
                "level": "",
                "decision_entropy": 0.5,
                "load": [1, 0, 3],
            }
            for i in range(20)
        ],
    }
    console.print(LiveRouting(console, title="many").render(report))
    frame = console.export_text()
    assert len(frame.splitlines()) <= 16 and "and 15 more routers" in frame and "no alert" in frame


def test_load_bars_are_scaled_to_the_largest_load():
    assert (
        load_bars([0, 1, 2, 4]).plain == "·▃▅█"
        and load_bars([0, 0]).plain == "··"
        and load_bars([5] * 64).plain == "▅" * 32
    )


def test_summary_and_lines_have_no_control_characters():
    console, model = Console(record=True, width=100, file=io.StringIO()), make_moe()
    with RoutingMonitor(model) as monitor:
        view = PlainRouting(console)
        monitor.listen(lambda placed, decisions, record: view.show(lambda position: "[red]\n", record, monitor.report))
        model.generate(PROMPT, **GREEDY)
    summary(console, monitor.report())
    text = console.export_text()
    assert text.count("[red]\\n") == 12 and "router.2" in text and "no alert" in text


def test_summary_lists_rules_with_too_few_tokens_as_unjudged():
    console, model = Console(record=True, width=200, file=io.StringIO()), make_moe()
    with RoutingMonitor(model) as monitor:
        model.generate(PROMPT, **GREEDY)
    report = monitor.report()
    assert report["unjudged"]["collapse"] == 2 * 512 and report["unjudged"]["entropy drift"] == (2 + 5) * 1024
    summary(console, report)
    assert "too few tokens that count yet for " in (text := console.export_text()) and "collapse (1024 tokens)" in text
    with RoutingMonitor(model, window=4, rules=(AlertRule("collapse", "spread", 0.01, 0.35, window=4),)) as judged:
        model.generate(PROMPT, **GREEDY)
    assert judged.report()["unjudged"] == {}
    summary(console, judged.report())
    assert "too few" not in console.export_text()
