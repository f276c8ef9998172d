"""Every numeric public argument refuses what is not a number, by name, and accepts NumPy's numbers."""

import math
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import HIDDEN
from corpora import make_tokenizer
from probemon import DynamicProbeManager, ProbePack
from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.fallback import FallbackPolicy
from probemon.adapters.bem.losses import LossWeights
from probemon.adapters.bem.memory import with_batch_backoff
from probemon.adapters.bem.training import TrainSettings
from probemon.adapters.routing.alerts import AlertRule
from probemon.adapters.routing.records import RoutingParquet
from probemon.adapters.routing.settings import RoutingSettings
from probemon.core.aggregate import Attention, Ema, RollingMax, RollingMean
from probemon.core.intervals import clopper_pearson, lower_bound, mean_interval, upper_bound
from probemon.core.probes import InputSpec
from probemon.engine.memory.arena import PagedArena
from probemon.engine.memory.store import ProbeStore
from probemon.errors import ConfigError, PackError, ProbemonError
from probemon.lab.calibration.calibrate import check_targets
from probemon.lab.calibration.expansion import documents_needed, split
from probemon.lab.corpora.analyze import Tables, analyze
from probemon.lab.corpora.compare import compare
from probemon.lab.corpora.documents import read_documents
from probemon.lab.corpora.report import write_report
from probemon.lab.corpora.windows import Reading, Window
from probemon.monitor.sinks import JsonLinesSink, MemorySink, ParquetSink
from probemon.packs.edit import subset
from probemon.packs.hierarchies import propose
from probemon.util.checks import check_bool, check_count, check_number, check_share, is_int, is_number, shown
from started import started

HUGE = {"10**30": 10**30, "10**400": 10**400, "-10**400": -(10**400), "10**5000": 10**5000}
NO_NUMBER = {
    "text": "3",
    "bytes": b"3",
    "list": [3],
    "true": True,
    "false": False,
    "numpy bool": np.True_,
    "complex": 3j,
    "object": object(),
    "array": np.array([3, 4]),
    "nan": math.nan,
}
NO_COUNT = NO_NUMBER | HUGE | {"float": 3.0, "numpy float": np.float32(3), "infinite": math.inf, "-infinite": -math.inf}


def count(argument, good, low, none=False):
    """A whole number from `low` on, 3 beyond which `good` is one."""
    bad = NO_COUNT | {"too low": low - 1, "far too low": -5} | ({} if none else {"none": None})
    return argument, [good, *(kind(good) for kind in (np.int64, np.int32, np.uint16))], bad


def number(argument, good, *bad, none=False, infinite=False, huge=True):
    """A number; those of `bad` are none of its range."""
    wrong = (
        NO_NUMBER
        | {name: HUGE[name] for name in ("10**400", "-10**400", "10**5000") if huge}
        | {str(value): value for value in bad}
        | ({} if none else {"none": None})
    )
    return (
        argument,
        [good, np.float64(good), np.float32(good)],
        wrong | ({} if infinite else {"infinite": math.inf, "-infinite": -math.inf}),
    )


def share(argument, good, **more):
    return number(argument, good, 0, 1, -0.1, 1.5, 0.0, 1.0, **more)


def manager_setting(name, row):
    return (
        f"DynamicProbeManager({name}=)",
        lambda env, value: DynamicProbeManager(env.pack, strategy="descent", impl="cpu", **{name: value}),
        row,
    )


def of(made, name, row, /, **settings):
    return (f"{made.__name__}({name}=)", lambda env, value: made(**{**settings, name: value}), row)


class OneSource:
    def load(self, probes):
        raise AssertionError


TABLE = [
    *(manager_setting(*pair) for pair in (
        ("keep_top_k", count("keep_top_k", 3, 0)), ("report_top_k", count("report_top_k", 3, 0)),
        ("max_loaded_probes", count("max_loaded_probes", 40, 1)),
        ("max_rounds", count("max_rounds", 3, 0, none=True)),
        ("load_threshold", number("load_threshold", 0.5, infinite=True)),
        ("unload_threshold", number("unload_threshold", 0.5, infinite=True)),
        ("audit_rate", number("audit_rate", 0.5, -0.1, 1.5)),
        ("arena_bytes", count("arena_bytes", 30_000, 0, none=True)), ("cache_bytes", count("cache_bytes", 3, 0)),
    )),
    ("DynamicProbeManager(base_layers=)", lambda env, value: DynamicProbeManager(env.pack, base_layers=[value]),
    count("base_layers", 0, 0)),
    ("DynamicProbeManager(prefetch=)", lambda env, value: DynamicProbeManager(env.pack, arena_bytes=10_000,
    prefetch=value), number("prefetch", 0.5, -0.1, 1.5)),
    ("score_tokens(prompt_len=)", lambda env, value: env.manager.score_tokens(torch.zeros(4, HIDDEN),
    prompt_len=value), count("prompt_len", 3, 0, none=True)),
    ("Scores.top(k)", lambda env, value: env.scores.top(0, value), count("k", 3, 0, none=True)),
    ("Scores.top(t)", lambda env, value: env.scores.top(value), ("t", [1, np.int64(1), np.uint8(1)], {k: v for k,
    v in NO_COUNT.items()})),
    ("Scores.column", lambda env, value: env.scores.column(value), count("probe", 3, 0)),
    ("attach(keep_tokens=)", lambda env, value: env.manager.attach(env.model, keep_tokens=value), count("keep_tokens",
    3, 1, none=True)),
    ("run.on(for_tokens=)", lambda env, value: env.run().on("c0", above=0.5, for_tokens=value, action="stop"),
    count("for_tokens", 3, 1)),
    ("run.on(above=)", lambda env, value: env.run().on("c0", above=value, action="stop"), number("above", 0.5, -0.1, 1,
    1.5, none=True)),
    ("stream(max_waiting=)", lambda env, value: env.stream(value), count("max_waiting", 3, 1)),
    ("analyze(rank=)", lambda env, value: env.analyze(rank=value, world_size=9), count("rank", 3, 0)),
    ("analyze(world_size=)", lambda env, value: env.analyze(world_size=value), count("world_size", 3, 1)),
    ("analyze(floor=)", lambda env, value: Tables(env.pack, value, True), number("floor", 0.5, -0.1, 1, 1.5)),
    ("read_documents(max_chars=)", lambda env, value: read_documents(["a"], max_chars=value), count("max_chars", 3, 1)),
    of(Window, "n_tokens", count("window", 300, 2)), of(Window, "overlap", count("window overlap", 3, 0)),
    of(Reading, "batch_tokens", count("batch_tokens", 3, 1)), of(Reading, "batch_rows", count("batch_rows", 3, 1)),
    of(InputSpec, "eps", number("eps of resid_post.0", 0.5, -0.1, 1e39), site="resid_post.0"),
    of(Attention, "temperature", number("temperature", 0.5, 0, -1)),
    of(Ema, "weight", number("weight", 0.5, 0, -1, 1.5)),
    of(RollingMean, "n", count("n", 3, 1)), of(RollingMax, "n", count("n", 3, 1)),
    ("calibrate_alerts(fpr=)", lambda env, value: check_targets(value, 0.95, "token"), share("fpr", 0.5)),
    ("calibrate_alerts(confidence=)", lambda env, value: check_targets(0.01, value, "token"), share("confidence", 0.5)),
    ("documents_needed(recall)", lambda env, value: documents_needed(value), share("recall", 0.5)),
    ("split(share=)", lambda env, value: split(9, share=value), share("share", 0.5)),
    ("split(seed=)", lambda env, value: split(9, seed=value), count("seed", 3, 0)),
    *((f"{f.__name__}(confidence)", lambda env, value, f=f: f(1, 9, value), share("confidence",
    0.5)) for f in (clopper_pearson, upper_bound, lower_bound)),
    ("mean_interval(confidence)", lambda env, value: mean_interval(0.5, 9, value), share("confidence", 0.5)),
    ("compare(confidence=)", lambda env, value: env.compare(confidence=value), share("confidence", 0.5)),
    ("compare(fdr=)", lambda env, value: env.compare(fdr=value), share("fdr", 0.5)),
    ("compare(resamples=)", lambda env, value: env.compare(resamples=value, confidence=0.5), count("resamples", 3, 3)),
    ("compare(seed=)", lambda env, value: env.compare(seed=value), count("seed", 3, 0)),
    ("write_report(text_megabytes=)", lambda env, value: env.report(text_megabytes=value), number("text_megabytes",
    0.5, -1)),
    ("write_report(max_pairs=)", lambda env, value: env.report(max_pairs=value), count("max_pairs", 3, 0)),
    ("propose(threshold=)", lambda env, value: env.propose(value), share("threshold", 0.5, none=True)),
    of(MemorySink, "max_tokens", count("max_tokens", 3, 1)),
    of(JsonLinesSink, "top_k", count("top_k", 3, 0, none=True), path="x.jsonl"),
    of(ParquetSink, "rows_per_group", count("rows_per_group", 3, 1), path="x.parquet"),
    of(RoutingParquet, "rows_per_group", count("rows_per_group", 3, 1), path="x.parquet"),
    ("run.to(sink, max_batches=)", lambda env, value: env.delivery(value), count("max_batches", 3, 1)),
    of(ProbeStore, "max_bytes", count("max_bytes", 3, 0), source=OneSource()),
    ("PagedArena(n_slots=)", lambda env, value: PagedArena(ProbeStore(OneSource(), max_bytes=1), like=env.pack.weights,
    n_slots=value, device=torch.device("cpu")), count("n_slots", 3, 1)),
    of(RoutingSettings, "window", count("window", 3, 1)),
    of(AlertRule, "window", count("window", 3, 1), kind="k", metric="gini", raise_at=0.5, clear_at=0.1),
    of(AlertRule, "in_a_row", count("in_a_row", 3, 1), kind="k", metric="gini", raise_at=0.5, clear_at=0.1),
    of(AlertRule, "raise_at", number("raise_at", 0.5), kind="k", metric="gini", clear_at=0.1),
    of(AlertRule, "clear_at", number("clear_at", 0.5), kind="k", metric="gini", raise_at=0.1),
    *(of(BemConfig, name, count(name, good, low)) for name, good, low in (("rank", 3, 1), ("width", 3, 1),
    ("prefix_tokens", 256, 1), ("read_layer", 3, 0), ("token_limit", 3, 0), ("seed", 3, 0))),
    of(BemConfig, "chunk_tokens", count("chunk_tokens", 32, 1)), of(BemConfig, "alpha", number("alpha", 0.5, 0, -1)),
    of(BemConfig, "max_norm", number("max_norm", 0.5, 0, 257)),
    *(of(BemConfig, name, number(name, 0.5, -0.1, 1)) for name in ("ema", "dropout")),
    *(of(BemConfig, name, number(name, 0.5, 0, -1, none=True)) for name in ("spectral_cap", "trust_region")),
    of(BemConfig, "sparse_eps", number("sparse_eps", 0.5, -1, none=True)),
    of(BemConfig, "bound", number("bound", 0.5, 0, 1.5)),
    of(BemConfig, "groups", count("groups", 3, 1), form="head_groups", sites=("o",)),
    of(BemConfig, "active", count("active", 3, 1), form="rank_mask"),
    of(BemConfig, "terms", count("terms", 3, 1), form="kronecker"),
    of(TrainSettings, "budget", count("budget", 3, 1, none=True), n_steps=3),
    *(of(FallbackPolicy, name, count(name, 3, 1)) for name in ("n_baseline", "n_failures")),
    of(FallbackPolicy, "window", count("window", 30, 1)),
    of(FallbackPolicy, "min_confidence", number("min_confidence", 0.5, -0.1, 1)),
    of(FallbackPolicy, "latency_factor", number("latency_factor", 1.5, 1, 0.5, none=True)),
    of(FallbackPolicy, "open_seconds", number("open_seconds", 0.5, -1)),
    of(TrainSettings, "n_steps", count("n_steps", 3, 1)),
    of(TrainSettings, "n_warmup", count("n_warmup", 3, 0), n_steps=3),
    of(TrainSettings, "seed", count("seed", 3, 0), n_steps=3),
    of(TrainSettings, "lr", number("lr", 0.5, 0, -1), n_steps=3),
    of(TrainSettings, "weight_decay", number("weight_decay", 0.5, -1), n_steps=3),
    of(TrainSettings, "max_grad_norm", number("max_grad_norm", 0.5, 0, none=True), n_steps=3),
    *(of(LossWeights, name, number(f"the weight of {name}", 0.5, -1)) for name in ("kl", "entropy", "update",
    "decorrelation", "flips", "gates")),
    ("with_batch_backoff(n)", lambda env, value: with_batch_backoff(lambda rows: None, value), count("n", 3, 0)),
    ("with_batch_backoff(size=)", lambda env, value: with_batch_backoff(lambda rows: None, 0, size=value),
    count("size", 3, 1, none=True)),
    ("with_batch_backoff(limit=)", lambda env, value: with_batch_backoff(lambda rows: None, 0, limit=value),
    number("limit", 0.5, 0, -1, 1.5)),
]  # fmt: skip


@pytest.fixture(scope="module")
def env(pack, model, tmp_path_factory):
    manager = DynamicProbeManager(pack, impl="cpu", strategy="descent")
    folder = tmp_path_factory.mktemp("checks")

    def stopped(call):
        """A call whose numbers are all checked, and which then has nothing to work on."""
        with pytest.raises(Exception) as caught:  # whatever it is, it is not about the argument
            call()
        if isinstance(caught.value, ProbemonError):
            raise caught.value

    def delivery(value):
        made = started(MemorySink(), max_batches=value)
        made.close()

    def proposed(value):
        with pytest.raises(PackError) as caught:
            propose(pack, threshold=value)
        if "not a flat pack" not in str(caught.value):
            raise caught.value

    def streamed(value):
        with suppress(AttributeError, TypeError):  # that is no tokenizer
            next(iter(manager.stream(model, object(), "text", max_waiting=value)))

    def analyzed(**settings):
        with suppress(AttributeError):  # there is no tokenizer
            analyze(manager, model, None, ["a"], folder / "out", **settings)

    return SimpleNamespace(
        pack=pack,
        model=model,
        manager=manager,
        scores=manager.score_tokens(torch.zeros(2, HIDDEN)),
        run=lambda: manager.attach(model),
        stream=streamed,
        analyze=analyzed,
        compare=lambda **settings: stopped(lambda: compare(None, None, **settings)),
        report=lambda **settings: stopped(lambda: write_report(SimpleNamespace(directory=folder), **settings)),
        propose=proposed,
        delivery=delivery,
    )


@pytest.mark.parametrize(("call", "row"), [case[1:] for case in TABLE], ids=[case[0] for case in TABLE])
def test_numeric_arguments_are_checked_alike(env, call, row):
    name, good, bad = row
    for value in good:
        call(env, value)
    for what, value in bad.items():
        with pytest.raises(ProbemonError) as caught:
            call(env, value)
            pytest.fail(f"{what} is taken")
        text = str(caught.value)
        assert name in text and len(text) < 600 and "\n" not in text, (what, text)


def test_numpy_numbers_in_settings_become_python_numbers(pack):
    config = DynamicProbeManager(
        pack, keep_top_k=np.int64(3), base_layers=np.arange(1), unload_threshold=np.float32(0.5), max_rounds=np.int8(2)
    ).config
    assert [
        type(value) for value in (config.keep_top_k, config.base_layers[0], config.unload_threshold, config.max_rounds)
    ] == [int, int, float, int]
    bem = BemConfig(rank=np.int64(4), alpha=np.float32(8), layers=(np.int64(1),))
    assert (
        bem == BemConfig(rank=4, alpha=8.0, layers=(1,))
        and type(bem.rank) is type(bem.layers[0]) is int
        and type(bem.alpha) is float
    )


@pytest.mark.parametrize("value", [math.nan, 10**400, "much", True, "auto"])
def test_recommended_settings_are_checked_like_user_settings(pack, value):
    recommended = pack.recommended
    try:
        pack.recommended = {**recommended, "load_threshold": value}
        with pytest.raises(ConfigError, match="load_threshold"):
            DynamicProbeManager(pack)
    finally:
        pack.recommended = recommended


def test_checks_return_python_numbers():
    assert (
        type(check_count("n", np.int64(3))) is int
        and type(check_number("x", np.float32(0.5))) is float
        and check_number("x", 3) == 3.0
    )
    assert (
        check_share("s", 0.5) == 0.5
        and check_bool("b", np.True_) is True
        and check_number("x", -math.inf, infinite=True) == -math.inf
    )
    assert (
        is_int(2**63 - 1)
        and not is_int(2**63)
        and not is_int(True)
        and not is_int(1.0)
        and is_number(3e38)
        and not is_number(4e38)
        and not is_number(math.nan)
    )
    with pytest.raises(PackError, match=r"^n is 7: give a whole number, 0 or more, at most 6$"):
        check_count("n", 7, most=6, error=PackError)
    for wrong in (1, 0, "True", None):
        with pytest.raises(ConfigError, match=r"^b is .*: give True or False$"):
            check_bool("b", wrong)
    assert shown("x" * 99) == "'" + "x" * 59 + "..." and shown(10**5000) == "a number of thousands of digits"


@pytest.mark.parametrize("bad", ["no", "true", 0, 1, None, 1.0, []], ids=repr)
def test_non_bool_flags_are_refused_if_data_could_be_lost(bad, pack, model, tmp_path):
    (tmp_path / "kept").write_text("kept")
    for call in (
        lambda: ProbePack.open(pack.directory, verify=bad),
        lambda: subset(pack, tmp_path / "kept", ["c0"], overwrite=bad),
        lambda: JsonLinesSink(tmp_path / "kept", overwrite=bad),
        lambda: DynamicProbeManager(pack).attach(model, strict=bad),
        lambda: analyze(DynamicProbeManager(pack), model, make_tokenizer(), ["ab"], tmp_path / "out", resume=bad),
        lambda: analyze(DynamicProbeManager(pack), model, make_tokenizer(), ["ab"], tmp_path / "out", keep_text=bad),
    ):
        with pytest.raises(ConfigError, match="give True or False"):
            call()
    assert (tmp_path / "kept").read_text() == "kept" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("bad", [None, 3, b"pack", ["pack"], object()], ids=lambda value: type(value).__name__)
def test_invalid_path_is_named(bad, pack):
    for call in (lambda: ProbePack.open(bad), lambda: subset(pack, bad, ["c0"])):
        with pytest.raises(ConfigError, match="path is"):
            call()


def test_missing_rows_and_tokens_of_a_result_are_named(pack, model):
    with DynamicProbeManager(pack).attach(model) as run, torch.no_grad():
        ids = torch.tensor([[1, 5, 9]])
        model(ids)
    result, several = run.result(ids), DynamicProbeManager({"one": pack, "other": pack}).pack
    for call, name in (
        (lambda row: result.aggregate("c0", "mean", row, phase=None), "row"),
        (lambda row: result.top(3, row), "row"),
        (lambda index: result.leading(index), "index"),
        (lambda k: result.leading(0, k), "k"),
        (lambda token: result.where(token), "token"),
        (lambda token: result.texts([0, token]), "tokens"),
        (lambda token: result.texts(np.array([token])), "tokens"),
        (lambda row: result.at(row, 1), "row"),
        (lambda probe: pack.path(probe), "probe"),
        (lambda probe: pack.precision(probe), "probe"),
        (lambda probe: several.precision(probe), "probe"),
    ):
        for bad in (-1, 10**30, math.nan, 1.5, True, "0", None, *([99] if name != "k" else [])):
            with pytest.raises(ConfigError, match=name):
                call(bad)
    for bad in (10**30, math.nan, 1.0, True, "1", None):
        for call in (result.before, lambda position: result.at(0, position)):
            with pytest.raises(ConfigError, match="position"):
                call(bad)
    for bad in (None, 1, "x", np.int64(1), np.array(1), np.array([[1]]), np.array([True, False, True])):
        with pytest.raises(ConfigError, match="tokens"):
            result.texts(bad)
    assert result.texts([np.int64(1)]) == result.texts(np.array([1])) == result.texts(range(1, 2)) == ["5 "]
    assert result.at(np.int64(0), np.int32(1)) == 1 and len(result.before(np.int64(2))) == 2
    assert len(result.before(-3)) == 0 and result.texts([]) == result.texts(np.array([])) == []


OF_ANOTHER_KIND = [
    None,
    3,
    "x",
    [3],
    {"a": 1},
    np.zeros(3),
    torch.zeros(3),
    object(),
    b"x",
    math.nan,
    [None],
    {"w1": None},
    {3: 3},
]


def written(path, **changes):
    g = torch.Generator().manual_seed(0)
    good = dict(
        name="random",
        licence="CC0-1.0",
        card="Random.\n",
        score_rule="independent",
        concepts=[{"id": f"c{i}", "name": f"c{i}", "parents": []} for i in range(8)],
        weights={"w1": torch.randn(8, 1, 16, generator=g), "b1": torch.randn(8, 1, generator=g)},
        inputs=[{"site": "resid_post.1", "norm": "rmsnorm"}],
        host={"model_id": "tiny", "hidden_size": 16, "n_layers": 3},
    )
    return ProbePack.write(path, **{**good, **changes})


@pytest.mark.parametrize(
    "argument",
    [
        "path",
        "name",
        "licence",
        "card",
        "score_rule",
        "concepts",
        "weights",
        "inputs",
        "host",
        "input_index",
        "alert_threshold",
        "expand_threshold",
        "aggregated",
        "golden_hidden",
        "recommended",
        "provenance",
        "quality",
        "overwrite",
    ],
)
def test_pack_fields_of_a_wrong_type_are_refused(argument, tmp_path):
    """What is of another kind is refused by the project's own errors, and nothing is left of it."""
    for at, value in enumerate(OF_ANOTHER_KIND):
        path = {} if argument == "path" else {"path": tmp_path / str(at)}
        if argument == "path" and isinstance(value, str):
            continue
        try:
            written(**path, **{argument: value})
        except ProbemonError:
            assert not (tmp_path / str(at)).exists()


@pytest.mark.parametrize("value", OF_ANOTHER_KIND, ids=lambda value: f"{value!r:.12}")
def test_wrong_types_raise_only_our_own_errors(value, tmp_path):
    pack = written(tmp_path / "pack")
    asked = (
        lambda: subset(pack, tmp_path / "part", value),
        lambda: DynamicProbeManager(pack, impl=value, strategy="descent"),
        lambda: DynamicProbeManager(pack, strategy=value, impl="cpu"),
        lambda: DynamicProbeManager(pack, device=value, strategy="descent", impl="cpu"),
        lambda: DynamicProbeManager(value),
        lambda: pack.find(value),
        lambda: pack.find_all(value),
        lambda: ProbePack.open(value),
        lambda: DynamicProbeManager(pack, always_on=value, strategy="descent", impl="cpu"),
        lambda: DynamicProbeManager(pack, base_layers=value, strategy="descent", impl="cpu"),
    )
    for ask in asked:
        with suppress(ProbemonError):
            ask()
