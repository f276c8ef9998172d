"""The documents tell the truth: their figures are those of the result files, the tree is the tree."""

import json
import math
import re
import statistics
import subprocess
from pathlib import Path

import pytest

import benchmark
import benchmark_bem
import figures
import kernel_figures
import vllm_figures
from mutate_alignment import MUTATIONS
from probemon.adapters.bem.config import FORMS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")


def page_of(name):
    """A page, its lines joined: where a line of prose is broken does not matter."""
    return flat([(ROOT / name).read_text(encoding="utf-8")])


def flat(lines):
    return " ".join(" ".join(lines).split())


def result(name):
    return json.loads((ROOT / "docs/benchmarks" / name).read_text())


def test_what_adapters_learn_is_what_was_measured():
    page, found = page_of("docs/bem.md"), result("bem_learns.json")
    over = found["two_domains"]["over_routed"]
    for name, words in (
        ("lora", "{mean:.3f} nats above the routed adapter's (95 % interval {low:.3f} to {high:.3f})"),
        ("lora, all linear layers", "{mean:.3f} ({low:.3f} to {high:.3f})"),
    ):
        assert words.format(**over[name]) in page and over[name]["excludes_0"] and over[name]["n"] == 5
    lost = found["afterwards"]["distilled"]["least_squares"]["squared_update_lost"]
    assert f"loses {100 * lost:.0f} % of the squared update" in page
    assert flat(figures.bem_distilled(found)) in page
    by_method = {row["method"]: row for row in found["distilled"]["summary"]}
    assert by_method["LoRA distilled"]["over_lora"]["n"] == 5 and by_method["LoRA distilled"]["over_lora"]["low"] < 0, (
        "no worse than a LoRA trained anew"
    )
    assert found["afterwards"]["base_restored_bit_for_bit"] and found["afterwards"]["cached_vs_full_max"] < 1e-5


def test_what_is_claimed_of_operations_is_what_was_found():
    found = result("operations.json")
    assert flat(figures.operations(found)) in page_of("docs/metrics.md")
    hooks_ms = found["claims"]["ladder_up_tokens"]["hooks_ms"]
    assert f"Hooks take {hooks_ms:.1f} ms a step" in page_of("docs/metrics.md")
    value = {name: claim["value"] for name, claim in found["claims"].items()}
    assert value["series_8000_concepts"] < 200 and value["scrape_ms"] < 5 and value["step_overhead_pct"] < 1
    assert value["ladder_down_tokens"] <= 50 and value["ladder_up_tokens"] <= 200
    assert value["drift_false_alarms_per_1000_days"] <= 1 and value["drift_detect_requests"] <= 1000
    assert all(claim["value"] == claim["of"] for claim in found["claims"].values() if "of" in claim)
    assert value["fuzzed_deployments"] == 10_000


def test_what_is_claimed_of_vllm_is_what_was_found():
    found, page = result("vllm.json"), page_of("docs/vllm.md")
    assert flat(vllm_figures.claims(found)) in page and flat(vllm_figures.runs(found)) in page
    assert flat([vllm_figures.soak(found)]) in page
    cost = found["parts"]["overhead"]
    said = f"took {cost['step_ms']:.1f} ms without scoring and {cost['watched_ms']:.1f} ms with it"
    assert said in page and f"clock {cost['in_worker_ms']:.1f} ms were spent on scoring" in page


def test_what_the_server_costs_is_what_was_measured():
    found, page = result("serving_load.json"), page_of("docs/serving.md")
    bars = {name: bar["found"] for name, bar in found["bars"].items()}
    n_pages = found["pages"]["reading"] + found["pages"]["never_reading"]
    for row in (
        f"its event at a page, median | {1000 * bars['first_event_seconds']:.0f} ms | 20 ms |",
        f"of what that takes | {100 * bars['added_share']:.1f} % | 2 % |",
        f"the same, that {n_pages} pages add, of which {found['pages']['never_reading']} never read |"
        f" {100 * bars['slowdown_share']:.1f} % | 3 % |",
        f"memory that these pages take | {bars['growth_bytes'] / 2**20:.0f} MB | 20 MB |",
        f"lost {found['events_dropped']:,.0f} events",
    ):
        assert row in page, row
    alone = found["seconds_a_token"]["alone"]
    ms = {name: 1000 * statistics.median(one[name] for one in alone) for name in alone[0]}
    for said in (
        f"{ms['added_between_forwards']:.1f} ms between the forwards",
        f"{ms['added_in_other_threads']:.1f} ms in other threads",
        f"beside {ms['generating']:.0f} ms that the token takes",
    ):
        assert said in page, said
    assert {name for name, bar in found["bars"].items() if not bar["met"]} == {"added_share"}
    assert "The bar of 2 % is missed" in page


def test_why_requests_are_not_batched_is_what_was_measured():
    found, page = result("batching_exactness.json")["found"], page_of("docs/decisions.md")
    beside = "together, beside generate()"
    rows = found["bfloat16"][beside]
    n, n_equal = (sum(row[name] for row in rows) for name in ("tokens", "tokens_with_equal_scores"))
    largest = {dtype: max(row["largest_difference"] for row in found[dtype][beside]) for dtype in found}
    assert (
        f"of {n} tokens of four chats {n_equal} have equal scores, one differs by {largest['bfloat16']:.4f}" in page
        and f"in fp32 scores differ by up to {largest['float32']:.1e}".replace("e-0", "e-") in page
    )
    assert any(not row["same_text"] for rows in found["bfloat16"].values() for row in rows)


def test_what_watching_states_and_slots_costs_is_what_was_measured():
    found = result("memory_overhead.json")
    assert flat(figures.memory_overhead(found)) in page_of("docs/recurrent-hosts.md")
    assert {(row["host"], row["way"]) for row in found["rows"] if row["bar"]} == {
        ("mamba2", "steps"),
        ("falcon_h1", "steps"),
        ("probemon_ltm", "reads"),
    }


def test_what_recalls_beyond_a_window_is_what_was_measured():
    found = result("ltm_recall.json")
    assert flat(figures.recall_study(found)) in page_of("docs/memory-hosts.md")
    assert {summary["n_seeds"] for summary in found["summaries"].values()} == {5}
    solved = {
        name: [summary[f"solved_recall_{key}"]["seeds"] for key in ("24", "24_and_384")]
        for name, summary in found["summaries"].items()
        if "parameters" in summary
    }
    assert solved["memory"] == [5, 4] and solved["memory, 12 slots"][1] == 0
    assert solved["full attention"] == solved["mamba"] == solved["window only"] == [0, 0]
    assert all(
        row["in_12_slots"]["recall_384"] > 0.99 for row in found["rows"] if row["model"] == "memory" and row["solved"]
    )


def test_what_recipes_do_to_hosts_is_what_was_measured():
    found, page = result("host_recipes.json"), page_of("docs/running-hosts.md")
    for table in (figures.recipes, figures.recipe_traps, figures.recipe_refusals):
        assert flat(table(found)) in page
    rows, counts = found["rows"], found["counts"]
    assert (
        f"Of {len(rows)} rows {counts['exact']} are exact, {counts['within bound']} are within their bound,"
        f" and {counts['refused']} are refused by an error that says why; none failed" in page
    )
    assert "failed" not in counts and found["passed"]
    every = next(row for row in rows if row["name"] == "int8, static calibration after a memory")
    assert f"host with slots by {every['trap_value']:.2f}, and the bound" in page and every["trap_least"] == 0.15
    unwatched = [row for row in rows if row["watched"] is None and row["verdict"] != "refused"]
    assert f"{len(unwatched)} rows have no such comparison" in page
    assert {row["watched_bound"] for row in rows} == {None, 1e-5, 0.02}


def test_forms_of_an_update_are_what_was_measured():
    found, page = result("perf_track_planted.json"), page_of("docs/bem.md")
    assert flat(figures.forms(found)) in page and found["data"] == "random"
    assert all(claim["holds"] for claim in found["claims"].values()), found["claims"]
    mean = {}
    for row in found["rows"]:
        mean.setdefault((row["task"], row["method"]), []).append(row["removed"])
    own = {task: sum(values) for (task, method), values in mean.items() if task == method}
    others = {task: max(sum(v) for (t, m), v in mean.items() if t == task and m not in (task,)) for task in own}
    assert {task for task in own if own[task] > others[task]} == {"head_groups", "kronecker", "film"}
    assert sum(mean["rank_mask", "low_rank"]) > own["rank_mask"] > sum(mean["rank_mask", "low_rank, rank 4"])
    apart = {task: max(mean[task, task]) - min(mean[task, task]) for task in own}
    assert f"its seeds are {apart.pop('rank_mask'):.2f} apart".replace("0.", ".") in page
    assert max(apart.values()) <= 0.08
    assert {len(values) for values in mean.values()} == {5}
    assert all(claim["holds"] for claim in result("perf_track_quick.json")["claims"].values())


def test_what_kernels_of_forms_could_spare_is_what_was_counted():
    found, page, decision = result("form_launches.json"), page_of("docs/bem.md"), page_of("docs/decisions.md")
    assert flat(figures.launches(found)) in page and found["data"] == "random"
    assert f"itself launches {found['host_launches']['1']:,} operations a step" in page
    steps, prompts = (
        {row["form"]: row for row in found["rows"] if (row["rows"] > 1) == many} for many in (False, True)
    )
    share = {
        form: row["update_launches"] / (row["update_launches"] + row["limit_launches"]) for form, row in steps.items()
    }
    moved = {form: row["update_bytes"] / row["fused_bytes"] for form, row in prompts.items()}
    assert (
        round(share["head_groups"], 2) == round(share["kronecker"], 2) == 0.13 and round(share["rank_mask"], 2) == 0.21
    )
    assert "updates are 13 % of what head groups and Kronecker products launch in a step and 21 % of rank" in decision
    assert 0.5 < share["film"] < 0.55 and max(moved["head_groups"], moved["rank_mask"]) < 4 / 3
    assert (
        f"moves {moved['film']:.1f} times the bytes of a kernel, Kronecker products {moved['kronecker']:.1f}"
        in decision
    )


def test_what_a_gpu_took_is_what_was_measured():
    found, page = result("nvidia-h100-80gb-hbm3.json"), page_of("docs/performance.md")
    assert flat(kernel_figures.gpu(found)) in page and flat(kernel_figures.gpu_claims(found)) in page
    scoring = {(r["hidden"], r["batch"], r["method"]): r for r in found["rows"] if r["part"] == "scoring"}
    for row in scoring.values():
        few = row["batch"] <= 8
        if row["method"] == "ours (triton)" and few:  # as long as torch takes to read the first layers
            assert row["ratio_to_floor"] < 1.1
    ours, bank = (scoring[2560, 1, name] for name in ("ours (triton)", "stacked bank, repaired"))
    at_most = ours["weight_bytes"] / found["read_gb_per_s"] / 1e3
    assert f"reads {found['read_gb_per_s']:,.0f} GB a second" in page
    assert f"the {ours['weight_bytes'] / 1e6:.0f} MB of 64 probes of D = 2,560 would take {at_most:.1f} µs" in page
    assert f"The bank takes {bank['median_us'] / at_most:.1f} times those {at_most:.1f} µs" in page
    alone = scoring[2560, 1, "ours (triton), launched from Python"]
    assert f"from Python a call takes {alone['median_us']:.0f} µs there" in page
    rows = {row["method"]: row for row in found["rows"] if row["part"] != "scoring"}
    step, of_probe = rows["a step"], 2 * (128 * 4096 + 64 * 128 + 64) + 4 * (128 + 64 + 1)
    reading = step["evaluated"] * of_probe / found["read_gb_per_s"] / 1e3
    assert (
        f"A step evaluates {step['evaluated']:.0f} probes there on average, whose bytes take {reading:.0f} µs" in page
    )
    whole = rows["a step, from Python to results on the host"]["median_us"]
    assert f"results on the host a step takes {whole:.0f} µs" in page
    bare, watched = rows["bare"]["median_us"], rows["watched"]["median_us"]
    assert (
        f"a decode step of {bare / 1e3:.1f} ms the step runs on a stream of its own and adds {watched - bare:.0f} µs"
        in page
    )


def test_what_paging_took_on_a_gpu_is_what_was_measured():
    found, page = result("nvidia-h100-80gb-hbm3.json"), page_of("docs/performance.md")
    siblings, scattered, plain = (row for row in found["rows"] if row["part"] == "paging")
    n_bytes, n, d = siblings["weight_bytes"], siblings["n_probes"], siblings["hidden"]
    assert (siblings["method"], scattered["method"]) == ("ours, siblings", "ours, scattered")
    assert (
        f"Bringing {n} missing probes of D = {d:,} from RAM, {n_bytes / 1e6:.1f} MB, takes"
        f" {siblings['median_us']:.0f} µs where they are siblings and {scattered['median_us']:.0f} µs where they are"
        f" scattered; tensor by tensor from pageable RAM it takes {plain['median_us']:,.0f} µs"
    ) in page


def test_what_kernels_need_of_a_gpu_is_what_was_compiled():
    found, page = result("kernel_resources.json"), page_of("docs/performance.md")
    assert flat(kernel_figures.kernel_resources(found)) in page and flat(kernel_figures.kernel_summary(found)) in page
    assert "The table below is an estimate on paper" in page and found["ran_on_a_gpu"] is False
    step, prompt, fp32 = (
        kernel_figures.rows_of(found, kernel, f"64 128-64-1 probes, {states}", dtype)[1]
        for kernel, states, dtype in (
            ("_states", "1 state", "bfloat16"),
            ("_states", "64 states", "bfloat16"),
            ("_layered_groups", "64 states", "float32"),
        )
    )
    assert step["hidden"] == prompt["hidden"] == 4096 and found["chips"]["90"]["name"] == "H100"
    assert f"needs {step['read_us']:.0f} µs for the weights and {step['flops_us']:.1f} µs for the products" in page
    assert f"the products take {prompt['flops_us']:.1f} µs beside {prompt['read_us']:.0f} µs of reading" in page
    assert f"in fp32, without matrix units, {fp32['flops_us']:.0f} µs" in page
    linear = kernel_figures.rows_of(found, "_linear", "64 linear probes, 1 state", "bfloat16")[1]
    assert f"has {linear['programs']} programs for {found['chips']['90']['processors']} processors" in page
    assert {row["sm"] for row in found["rows"]} == {80, 90, 100} and all("error" not in row for row in found["rows"])


def test_the_reason_to_route_is_what_was_measured():
    found, page = result("bem_reason.json"), page_of("docs/bem.md")
    assert flat(figures.reason(found)) in page and found["cut_host_error"] < 1e-5
    [routed] = [row for row in found["summary"] if row["method"] == "low_rank" and row["headers"] == "marks"]
    assert f"has {routed['frozen']:.3f} nats, with those of other rows {routed['shuffled']:.3f}" in page
    beside = [row for row in found["summary"] if row["method"] != "low_rank"]
    assert all(row["over_routed"]["n"] == 5 for row in beside)
    behind = {(row["headers"], row["method"]) for row in beside if row["over_routed"]["low"] > 0}
    assert behind == {(by, name) for by in ("marks", "words") for name in ("base", "lora", "x-lora")}
    everywhere = {row["headers"]: row["over_routed"] for row in beside if row["method"] == "lora everywhere"}
    assert everywhere["marks"]["low"] < 0 < everywhere["marks"]["high"] and everywhere["words"]["high"] < 0
    sizes = [row["n_trainable"] for row in found["summary"] if row["method"] != "base"]
    assert max(sizes) / min(sizes) < 1.02  # a LoRA everywhere comes in steps of its rank
    assert f"at most {result('bem.json')['claims']['latency_over_lora_pct']['value']:.1f} % more" in page


def test_what_forms_of_an_update_save_on_real_texts_is_what_was_measured():
    found, page = result("perf_track.json")["demo"], page_of("docs/bem.md")
    assert flat(figures.demo_forms(result("perf_track.json"))) in page
    saved = {one["method"]: one for one in found["verdicts"]}
    assert {name for name, one in saved.items() if one["high"] < 0} == {"x-lora", "head_groups", "film"}
    assert max(saved, key=lambda name: saved[name]["saved_nats"]) == "kronecker"
    times = found["costs"]["kronecker"]["operations"] / found["costs"]["lora"]["operations"]
    assert f"compute {times:.0f} times what a LoRA does" in page
    steps = {form: found["costs"][form]["step"]["ratio"][0] for form in FORMS}
    of_bem = [row for row in result("bem.json")["rows"] if row["method"] == "bem, eager"]
    whole = max(row["over_lora_pct"] for row in of_bem if row["part"] == "decode")
    assert (
        f"takes {steps.pop('low_rank'):.2f} times the LoRA's with low_rank and up to {max(steps.values()):.2f} with the"
        f" others; through the whole model at most {whole:.1f} % more" in page
    )
    seeds = {method: [row["seed"] for row in found["rows"] if row["method"] == method] for method in saved}
    assert all(sorted(own) == [0, 1, 2, 3, 4] for own in seeds.values())


def test_how_soon_and_how_falsely_drift_is_found_is_what_was_simulated():
    found, page = result("drift.json"), page_of("docs/drift.md")
    assert flat(figures.drift_doubled(found)) in page and found["data"] == "random"
    n = found["drift_false_alarms_per_1000_days"]
    assert f"with {found['n_concepts']} concepts, there were {n}." in page and n <= found["expected_at_most"] == 1
    assert found["drift_detect_requests"] <= 1000


def test_what_settings_cost_and_find_is_what_was_measured():
    found, page = result("settings.json"), page_of("docs/settings.md")
    assert flat(figures.settings(found)) in page and "passage of 218 tokens" in page
    for said in found["packs"].values():
        by_name = {json.dumps(trial["changes"]): trial for trial in said["trials"]}
        exact, one = by_name['{"load_threshold": "exact"}'], by_name['{"max_rounds": 1}']
        assert said["n_tokens"] == 218 and exact["found"] == by_name["{}"]["found"] == 1 > one["found"]
        assert one["n_evaluated"] < exact["n_evaluated"] < said["n_probes"]
    linear = found["packs"]["wordnet-smollm2-135m"]["trials"][0]
    assert f"the engine's part of it takes {linear['step_us'] / 1000:.1f} ms" in page_of("docs/performance.md")


def test_tables_of_the_benchmark_are_those_of_its_result_file():
    measured, page = result("cpu.json"), page_of("docs/performance.md")
    assert measured["suite"] == "cpu" and set(measured["claims"]) == set(benchmark.BARS)
    for table in figures.TABLES["cpu.json"]:
        assert flat(table(measured)) in page
    cells = {}
    for row in measured["rows"]:
        if row["part"] == "scoring" and not row["method"].startswith("floor"):
            cells.setdefault((row["hidden"], row["dtype"], row["n_probes"], row["batch"]), {})[row["method"]] = row
    fastest = {cell: min(rows, key=lambda name: rows[name]["median_us"]) for cell, rows in cells.items()}
    assert {name for name in fastest.values()} <= {"ours (numba)", "ours (numba), int8 copies"}
    assert "Ours is the fastest of the ways that were measured in every cell" in page
    paged = {row["method"]: row for row in measured["rows"] if row["part"] == "paging"}
    assert (
        f"{paged['paged, copies in RAM']['ratio_to_ours']:.1f} times" in page
        and f"{paged['paged, nothing kept in RAM']['ratio_to_ours']:.1f} times" in page
    )
    for row in measured["rows"]:
        if row["part"] == "scoring" and row["max_error"] is not None:
            assert row["max_error"] < (
                1e-6 if row["method"].startswith("ours") else 5e-3
            )  # what the page says of errors


def test_a_pack_that_does_not_fit_is_what_was_measured():
    found, page = result("paging.json"), page_of("docs/performance.md")
    assert flat(figures.paging(found)) in page and found["pack_mb"] > found["limit_mb"]
    assert f"{found['n_probes']:,} random probes" in page
    assert f"{found['pack_mb']:,} MB of weights" in page and f"may use {found['limit_mb']:,} MB" in page


def test_agreement_is_what_was_measured():
    rows, page = result("agreement.json")["rows"], page_of("docs/promises.md")
    assert len(rows) == 12 and all(
        row["largest"] == 0 and row["n_scores"] > 4000 for row in rows if row["mode"].endswith("same forwards")
    )
    others = [row for row in rows if not row["mode"].endswith("same forwards")]
    largest = {
        dtype: max(row["largest"] for row in others if row["dtype"] == dtype) for dtype in ("float32", "bfloat16")
    }
    bf16 = [row for row in others if row["dtype"] == "bfloat16"]
    once, fired = (sum(row[name] for row in bf16) for name in ("n_fired_in_one_only", "n_fired"))
    assert (
        f"at most {largest['float32']} in fp32 and {largest['bfloat16']} in bf16, where {once} of {fired:,} pairs"
        in page
    )
    assert not any(row["n_fired_in_one_only"] for row in others if row["dtype"] == "float32")


def test_the_cost_of_a_corpus_is_what_was_measured():
    found, page = result("corpus.json"), page_of("docs/performance.md")
    memory = found["memory"]
    claim, packs = found["claim"], found["packs"].values()
    assert (
        flat(figures.corpus(found)) in page and claim["bar_pct"] == 5 and "The bar, at most 5 %, is for hosts" in page
    )
    assert claim["value_pct"] == max(pack["overhead_whole_host_pct"] for pack in packs)
    low, high = claim["interval_pct"]
    assert (low <= 5 < high) == (claim["holds"] is None) == ("whether it holds cannot be told here" in page)
    assert all(pack["overhead_interval"][1] < 0 for pack in packs)
    (n_documents,) = {pack["n_documents"] for pack in packs}
    assert f"in turns ({n_documents} BBC articles" in page
    few_shapes = found["memory_few_shapes"]
    assert (
        f"over {memory['n_tokens']:,} tokens" in page
        and f"rise by {memory['growth_pct']:.1f} % from" in page
        and f"to {memory['late_bytes'] / 1e9:.2f} GB. What rises is the host's" in page
        and f"they rise by {few_shapes['growth_pct']:.1f} %, to {few_shapes['late_bytes'] / 1e9:.2f} GB." in page
    )
    assert all(f"{name}={value}" in page for name, value in few_shapes["variables"].items())
    assert memory["n_tokens"] == few_shapes["n_tokens"] > 1_000_000 and few_shapes["growth_pct"] < 2


def test_the_cost_of_a_routed_adapter_is_what_was_measured():
    page, found = page_of("docs/bem.md"), result("bem.json")
    assert flat(figures.bem_claims(found)) in page and flat(figures.bem_grid(found)) in page
    assert found["claims"]["latency_over_lora_pct"]["bar"] == benchmark_bem.BARS["latency_over_lora_pct"][0] == 12
    assert {row["length"] for row in found["rows"]} == {128, 256, 512, 2048} and found["suite"] == "grid"
    hooks = max(row["hooks_ms"] / row["median_ms"] for row in found["rows"] if "hooks_ms" in row)
    assert (
        f"takes at most {100 * hooks:.1f} % of a forward" in page
        and f"({found['checked']['host_cached_vs_full_max']:.2g})" in page
    )
    assert found["checked"]["u0_max_difference"] == 0
    quick = result("bem_quick.json")
    assert (
        quick["suite"] == "quick"
        and quick["seconds"] < 300
        and f"in {quick['seconds']:.0f} s" in page
        and set(quick["claims"]) == set(found["claims"])
    )


def test_importing_takes_what_was_measured():
    found, page = result("import.json"), page_of("docs/bring-your-own-probes.md")
    said = (
        f"{found['counts']['probes']:,} random probes of {found['hidden_size']:,} values (bf16,"
        f" {found['source_bytes'] / 1e9:.1f} GB of files) take {found['seconds']:.0f} s on a 2-core CPU"
    )
    assert f"{said} and {found['peak_bytes_over_start'] / 1e6:.0f} MB of memory" in page
    assert found["counts"]["probes"] == 8000 and found["seconds"] <= 120 and found["claim"]["holds"]


def test_fuzzing_found_what_is_said():
    found, page = result("fuzz.json"), page_of("docs/bring-your-own-probes.md")
    uncompared = found["outcomes"]["made, not compared"]
    assert (
        f"of {found['cases']:,} cases, {found['outcomes']['made']:,} gave a pack that verifies" in page
        and f"does, {uncompared:,} one that has" in page
    )
    assert found["crashes"] == 0 and found["troubles"] == []


def test_false_alarms_of_routing_are_what_was_counted():
    found, page = result("routing_alarms.json"), page_of("docs/bem.md")
    assert (
        f"raised {found['false_alarms']} false alarms in {found['windows']:,} windows, at most"
        f" {found['false_alarms_per_window_at_most']:.5f} a window" in page
    )
    assert found["steps"] >= 100_000


def test_guessed_codes_would_have_spared_as_little_as_is_said():
    found, page = result("bem_schedules.json")["speculation"], page_of("docs/bem-rows.md")
    assert f"{found['n_hits']} of {found['n_predicted']} guessed chunk codes came true" in page and found["same_text"]
    step, limits = found["milliseconds_a_step"]["plain"], found["milliseconds_of_limits"]
    assert f"{limits:.1f} ms of a step of {step:.1f} ms" in page


def test_known_delays_were_measured_as_well_as_is_said():
    rows, page = result("ruler.json")["rows"], page_of("docs/performance.md")
    known = [row for row in rows if "known_pct" in row]
    n_within = sum(row["interval_pct"][0] <= row["known_pct"] <= row["interval_pct"][1] for row in known)
    assert f"The truth lay in {n_within} of {len(known)} intervals" in page
    assert f"at most {max(abs(row['added_pct'] - row['known_pct']) for row in known):.1f} % of a step off it" in page
    widths = [row["interval_pct"][1] - row["interval_pct"][0] for row in rows]
    assert min(widths) > 0.5 and f"were {min(widths):.1f} to {max(widths):.1f} % wide" in page


def test_what_bounds_missed_bars_of_the_cpu_is_what_its_file_says():
    page, found = page_of("docs/performance.md"), result("cpu.json")
    rows = {(row["part"], row["method"], row.get("n_probes")): row for row in found["rows"] if row.get("hidden") == 576}
    of_64 = {
        (row["hidden"], row["method"].split()[0]): row
        for row in found["rows"]
        if (row["part"], row.get("dtype"), row.get("batch"), row.get("n_probes")) == ("scoring", "bfloat16", 1, 64)
        and row["method"] in ("ours (numba)", "floor: read the same bytes")
    }
    over = [of_64[d, "ours"]["ratio_to_floor"] for d in (576, 2560, 4096)]
    assert (
        "{:.2f} times the floor at D = 576, {:.2f} times at D = 2,560 and {:.2f} times at D = 4,096".format(*over)
        in page
    )
    more_ms = [(of_64[d, "ours"]["median_us"] - of_64[d, "floor:"]["median_us"]) / 1e3 for d in (576, 2560, 4096)]
    assert over[0] > over[1] > over[2] and more_ms[0] > 0.9 * more_ms[1] and more_ms[0] > more_ms[2]
    assert f"over it, {min(more_ms):.2f} to {max(more_ms):.2f} ms, does not grow with what is read" in page
    step, twin = (rows["step", name, 5000] for name in ("ours: a step", "slow twin: a step"))
    read_us = of_64[576, "floor:"]["median_us"] / 64 * step["evaluated"]
    times = twin["median_us"] / read_us
    assert f"evaluates {step['evaluated']:.0f} probes, whose bytes take {read_us / 1e3:.2f} ms to read" in page
    assert f"step takes {twin['median_us'] / 1e3:.1f} ms, which is {times:.0f} times as long" in page
    first = rows["cold", "slow twin: a cold step", 5000]["median_us"] / step["median_us"]
    assert f"would still be {math.floor(first)} times as quick" in page and first < 30
    assert times < 60


def test_kept_code_buffers_gain_as_little_as_is_said():
    rows, page = result("code_buffers.json")["rows"], page_of("docs/decisions.md")
    assert all(abs(row["new_us"] - row["kept_us"]) < 0.01 * row["governance_us"] for row in rows)
    saved = max(row["new_us"] - row["kept_us"] for row in rows if row["n_tokens"] <= 8)
    assert f"kept buffers save at most {saved:.0f} µs of a step" in page


def test_quality_is_what_was_measured():
    page, found = page_of("docs/quality.md"), result("quality.json")
    assert flat(figures.rules(found)) in page and flat(figures.retained(found)) in page
    rows = found["rows"]
    for row in rows:
        if row["rule"] == "exact" and row.get("max_rounds", "none") != 1:
            assert row["firing_recall"] == row["document_recall"] == 1
    of_news = [row for row in rows if row["rule"].startswith("calibrated") and row["text"] == "news"]
    over = [row["document_recall"] - float(row["rule"].split()[1]) for row in of_news]  # the text that the bound is for
    assert all(row["document_high"] >= float(row["rule"].split()[1]) for row in of_news) and min(over) > -0.01
    assert len(over) == 12 and sum(value >= 0 for value in over) == 10 and "of twelve recalls on news ten reach" in page
    best = [row["document_recall"] for row in rows if row.get("keep_top_k") == 100 and row["max_rounds"] == 1]
    assert f"misses {1 - max(best):.0%} to {1 - min(best):.0%}".replace("%", " %") in page
    alone = [row["document_recall"] for row in rows if (row["score_rule"], row["rule"]) == ("independent", "fixed 0.3")]
    assert f"from {min(alone):.0%} to {max(alone):.0%}".replace("%", " %") in page
    for pack in ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp"):
        assert json.loads((ROOT / "probes" / pack / "manifest.json").read_text())["recommended"] == {
            "load_threshold": "exact",
            "keep_top_k": 0,
        }


def test_cases_of_training_are_what_was_measured():
    page, found = page_of("docs/training.md"), result("training.json")
    for table in (figures.training, figures.training_costs):
        assert flat(table(found)) in page
    claims = found["claims"]
    assert set(claims) == set(found["bars"])
    missed = [name for name, claim in claims.items() if not claim["holds"]]
    worst = min(found["cases"]["mails"]["concepts"].items(), key=lambda item: item[1]["auroc"])
    assert worst[0] == "sells" and missed == ["mails_auroc"]
    assert (
        f"One bar is missed: an area of {found['bars']['mails_auroc']:.3f} was asked for, and that of mails that sell"
        f" is {claims['mails_auroc']['value']:.4f} (95 % interval {worst[1]['low']:.3f} to {worst[1]['high']:.3f})"
        in page
        and f"the words of a mail reach {worst[1]['baselines']['words']:.3f}" in page
    )
    many = result("training_thousand.json")["cases"]["thousand"]
    assert many["areas"]["concepts"] == 1000 and sum(part["tokens"] for part in many["examples"].values()) > 1e6
    assert f"took {many['minutes']:.0f} minutes and {many['gigabytes']:.0f} GB of memory" in page
    took = found["cases"]["pairs"]["minutes"], len(found["cases"]["pairs"]["sites"])
    assert f"fifty sentences at five layers took {took[0]:.1f} minutes" in page and took[1] == 5
    pairs = found["cases"]["pairs"]["concepts"]["scrambled"]
    assert pairs["baselines"]["words"] == 0.5 and pairs["tpr_at_fpr"]["0.01"] is None


def test_mails_are_what_was_measured():
    page, found = page_of("docs/quality.md"), result("mails.json")
    assert flat(figures.mails(found)) in page
    assert (
        f"{sum(sum(part.values()) for part in found['mails'].values()):,} mails" in page
        and f"{found['mails']['watch']['spam']} spam and {found['mails']['watch']['ham']} other" in page
    )
    rows = {row["method"]: row for row in found["rows"]}
    for row in found["rows"]:
        assert all(row[unit]["fpr"]["rate"] <= 0.01 for unit in ("token", "document") if row[unit])
    caught = {name: row["document"]["tpr"]["rate"] for name, row in rows.items()}
    assert (
        max((rate, name) for name, rate in caught.items() if rows[name]["token"])[1] == "ema(0.3)"
        and caught["mean"] < caught["each"] > caught["attention(0.1)"]
    )
    assert min(rate for name, rate in caught.items() if not rows[name]["token"]) > caught["ema(0.3)"]


def test_eviction_is_what_was_measured():
    for trace in result("eviction.json")["traces"].values():
        for share, misses in trace["misses"].items():
            assert float(share) > 2 or misses["least often used lately"] < misses["least recently used"]


def test_speedup_over_the_first_implementation_is_the_measured_one():
    profile, page = result("profile_cascade.json"), page_of("docs/performance.md")
    for name, words in (("no_pruning", "no pruning"), ("top_50", "top-50"), ("top_30", "top-30")):
        twin, ours = profile["twin"][name]["mean_ms"], profile["ours"][name]["mean_ms"]
        assert f"| {words} | {twin:.1f} ms | {ours:.2f} ms | {twin / ours:.1f}x |" in page
    assert profile["speedup_top_30"] >= 10


def test_memory_is_what_was_measured():
    soak, page = result("soak.json"), page_of("docs/performance.md")
    assert (
        soak["n_tokens"] == 100_000 and soak["flat"] and soak["bounded"]["sink"] == {"written": 100_000, "dropped": 0}
    )
    bare, watched = (soak[arm]["growth_bytes"] / 1e6 for arm in ("bare", "bounded"))
    assert f"grew by {bare:.1f} MB" in page and f"took every token) by {watched:.1f} MB" in page
    assert f"cost {soak['kept_bytes_per_token'] / 1e3:.1f} kB a token" in page


def test_no_architecture_is_wrong_in_any_mode():
    found, page = result("architectures.json"), page_of("docs/compatibility.md")
    rows = {name: row["modes"] for name, row in found["architectures"].items() if "modes" in row}
    assert (
        len(rows) >= 170 and len(found["modes"]) >= 10 and all(set(row) == set(found["modes"]) for row in rows.values())
    )
    entries = [entry for row in rows.values() for entry in row.values()]
    assert {entry["outcome"] for entry in entries} == {"exact", "as run", "refused", "host fails"}
    assert {row["corpus"]["outcome"] for row in rows.values()} == {"exact", "refused"}  # of encoder-decoders
    for entry in entries:
        if entry["outcome"] in ("exact", "as run"):
            assert entry.get("own", 0.0) <= 1e-5 and (entry["deviation"] <= found["bar"] or entry["host"] > 1e-3)
    assert flat(figures.architectures(found)) in page
    assert f"which of {len(found['architectures'])} architectures are exact" in page_of("docs/faq.md")


def test_every_mutation_of_attribution_is_caught():
    found = result("mutations.json")
    assert found["n_caught"] == found["n_mutations"] >= 30


@pytest.mark.parametrize("name", PACKS)
def test_quality_of_the_shipped_packs_is_their_own(name):
    manifest = json.loads((ROOT / "probes" / name / "manifest.json").read_text())
    q, shape = manifest["quality"], manifest["architecture"]
    size = sum(f["size"] for f in manifest["files"].values()) / 1e6
    words = "linear" if not shape["hidden"] else "-".join(map(str, [*shape["hidden"], 1]))
    line = (
        f"| `{name}` | {q['n_probes']}, {words} | {size:.1f} MB | {q['auroc_median']:.3f} | {q['auroc_p10']:.3f} |"
        f" {q['auroc_examples_median']:.3f} | {q['auroc_siblings_median']:.3f} |"
    )
    assert line in page_of("docs/shipped-packs.md")


def test_sober_figures_are_said_beside_the_flattering_ones():
    q = json.loads((ROOT / "probes" / PACKS[0] / "manifest.json").read_text())["quality"]
    assert f"the median is {q['auroc_siblings_examples_median']:.3f}" in page_of("docs/shipped-packs.md")
    assert f"has {q['n_probes']} concepts" in flat([README])


def test_what_fires_is_as_right_as_is_said():
    found = result("shown.json")
    claims, first = found["claims"], found["packs"][PACKS[0]]
    assert claims["precision_news_0_7"] >= 0.95 and claims["precision_unseen_source_0_7"] >= 0.9
    assert claims["precision_recommended"] >= 0.9
    assert claims["fires_per_other_token"] <= 0.02 and claims["fires_per_code_token"] <= 0.02
    for name in PACKS:
        pack = json.loads((ROOT / "probes" / name / "manifest.json").read_text())
        assert found["packs"][name]["n_concepts"] == pack["quality"]["n_probes"] >= 400
    right = f"{claims['precision_recommended']:.1%}".replace("%", " %")
    assert f"{right} of what fired on texts and words that trained nothing" in page_of("docs/numbers.md")
    assert f"Of what fired on texts and words that trained nothing {right} was right" in flat([README])
    news = first["texts"]["news"]["share_evaluated"]
    assert f"evaluates {news['precision_0.9']:.1%} of the probes where {news['rate_0.01']:.1%} were".replace(
        "%", " %"
    ) in page_of("docs/numbers.md")
    page = page_of("docs/quality.md")
    assert flat(figures.shown(found)) in page and flat(figures.shown_claims(found)) in page


def test_tree_in_the_architecture_is_the_tree():
    text = (ROOT / "docs/architecture.md").read_text()
    named, folders = set[str](), list[str]()
    for line in text.split("## The tree")[1].split("```")[1].splitlines()[1:]:
        words = line.split()
        if words[0] == ".":
            named |= {"/".join([*folders[1:], word]) for word in words[1:]}
        else:
            folders = [*folders[: (len(line) - len(line.lstrip())) // 2], words[0].rstrip("/")]
    package = ROOT / "probemon"
    files = subprocess.run(["git", "ls-files", "."], cwd=package, capture_output=True, text=True, check=True)
    there = {name.removesuffix(".py") for name in files.stdout.split() if not name.endswith(("__.py", "py.typed"))}
    assert named == there
    for test in re.findall(r"`(test_\w+)`", (ROOT / "docs/decisions.md").read_text()):
        assert any(f"def {test}(" in f.read_text() for f in (ROOT / "tests").rglob("*.py")), test


def test_what_a_soak_of_the_server_found_is_what_is_said():
    found, page = result("serving_soak.json"), page_of("docs/serving.md")
    end, memory = found["sigterm"], found["resident_bytes"]
    assert f"All {found['answers_equal_to_alone']} answers were those of the same request alone" in page
    assert found["n_wrong"] == found["pages"]["not_accounted_for"] == 0 and not found["pages"]["problems"]
    assert f"{found['clients_that_left']} times one left" in page and end["answered"] == end["asked"] == 4
    assert f"grew by {memory['growth'] / 1e6:.0f} MB, to {memory['last'] / 1e6:.0f}" in page
    assert not found["claims"]["memory is flat"] and "the bar of 20 is missed" in page
    late, last = next(at for at in memory["by_minute"] if at["seconds"] >= 480), memory["by_minute"][-1]
    half = next(at for at in memory["by_minute"] if at["seconds"] >= 300)["answered"]
    n_events = found["pages"]["events_read"] / found["pages"]["n"] * half / last["answered"]
    assert min(half / 100, n_events / 4096) > 1 and "is full before half of the time" in page
    assert (
        f"it grew by {(last['bytes'] - late['bytes']) / 1e6:.1f} MB while {last['answered'] - late['answered']}" in page
    )


def test_tables_have_a_line_for_each_row():
    """Figures are looked for in joined lines, so a table that was wrapped as prose is would not be missed."""
    wrapped = re.compile(r"\S.*\|-{2,}\|")
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    assert len(pages) > 30
    assert not [
        page.name
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if wrapped.match(line) and not re.fullmatch(r"[|:\- ]+", line)
    ]


def test_every_result_file_names_its_commit_and_machine():
    for path in (ROOT / "docs/benchmarks").glob("*.json"):
        found = json.loads(path.read_text())
        parts = list(found.values()) if "commit" not in str(list(found)) and "machine" not in found else [found]
        for part in parts:
            commit = part.get("commit") or part.get("machine", {}).get("commit")
            assert commit and re.fullmatch(r"[0-9a-f]{40}", commit), path


def test_the_error_of_int8_copies_is_that_of_the_result_file():
    packs = json.loads((ROOT / "docs/benchmarks/int8.json").read_text())["packs"]
    linear, mlp = (packs[name] for name in PACKS)
    page = page_of("docs/shipped-packs.md")
    assert (
        f"by at most {linear['max_score_error']:.4f} and {linear['n_fired_changed']} of {linear['n_fired']} firing"
        " pairs change" in page
    )
    assert f"by at most {mlp['max_score_error']:.4f} and {mlp['n_fired_changed']} of {mlp['n_fired']} (" in page
    assert all(one["n_states"] == 16 and one["int8_bytes"] < 0.52 * one["weight_bytes"] for one in packs.values())


def test_every_mutation_finds_its_line():
    """Else the script that breaks attribution on purpose ends before it has shown anything."""
    for file, before, after, what in MUTATIONS:
        assert (ROOT / "probemon" / file).read_text().count(before) == 1 and before != after, (file, what)
