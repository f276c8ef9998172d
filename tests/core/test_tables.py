"""A name that is added to a table only is an error that says so, wherever the table is used."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import probemon
from probemon.core import aggregate, columns, dtypes, probes, score_rules
from probemon.core.aggregate import AGGREGATORS, AggregatorForm, aggregator_forms, over, parse
from probemon.core.columns import COLUMNS, arrow_fields
from probemon.core.dtypes import CODES, WEIGHTS, code_of, input_dtype, of_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import prepare_input
from probemon.core.plan import CascadePlan, auto_threshold, expand_thresholds
from probemon.core.probes import NORMS, InputSpec
from probemon.core.reference import scores_of_logits
from probemon.core.score_rules import SCORE_RULES, follows_path
from probemon.core.scores import COUNTS, Coverage
from probemon.core.settings import CascadeConfig
from probemon.engine.kernels import check_impl
from probemon.engine.kernels.numba_inputs import prepare_few, prepare_numba
from probemon.errors import ConfigError, KernelUnavailable
from probemon.lab.corpora.analysis_files import COUNTED, schemas
from probemon.lab.training.running_scores import highest_running
from probemon.monitor.rule_spec import RuleSpec

PACKAGE = Path(probemon.__file__).parent


def source(path):
    return (PACKAGE / path).read_text(encoding="utf-8")


# -- norms


def normalise_in_triton(hidden, spec, dtype):
    triton_pairs = pytest.importorskip("probemon.engine.kernels.triton_pairs")
    return triton_pairs.normalise_triton(hidden, spec.norm, spec.eps, dtype)


NORMALISERS = {
    "torch": prepare_input,
    "numba": prepare_numba,
    "numba, a few": lambda hidden, spec, dtype: prepare_few(hidden, spec, dtype, None),
    "triton": normalise_in_triton,
}


@pytest.mark.parametrize("name", NORMALISERS)
def test_norm_added_only_to_the_table_is_refused(name, monkeypatch):
    monkeypatch.setattr(probes, "NORMS", (*NORMS, "l2"))
    spec = InputSpec("resid_post.0", "l2")  # which the table allows now
    with pytest.raises(ConfigError, match="does not compute norm 'l2'"):
        NORMALISERS[name](torch.ones(2, 3), spec, torch.float32)


# -- aggregators


class Unlike(aggregate._Stepped):
    """An aggregator that nothing but the table knows."""

    def __str__(self):
        return "unlike"


def test_aggregator_added_to_the_table_is_parsed_and_listed(monkeypatch):
    monkeypatch.setitem(AGGREGATORS, "unlike", AggregatorForm(Unlike))
    assert isinstance(parse("unlike"), Unlike)
    with pytest.raises(ConfigError, match=r"max, attention, .*rolling_logit:N or unlike, with"):
        parse("likely")


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_aggregator_parses_from_its_name_and_runs_in_training(name):
    form = AGGREGATORS[name]
    made = [one for one in (form.make and form.make(), form.example and parse(form.example)) if one]
    assert made and all(parse(str(one)) == one for one in made)
    assert bool(form.make_of) == bool(form.letter) == bool(form.example)
    scores = torch.from_numpy(np.random.default_rng(0).random((40, 3), dtype=np.float32))
    part = np.repeat([0, 1, 3], [1, 30, 9])
    for one in made:
        highest = highest_running(one, scores, torch.from_numpy(part), 4)
        assert np.isnan(highest[2]).all()
        for i in (0, 1, 3):
            assert np.array_equal(highest[i], over(one, scores[part == i].numpy()).max(axis=0)), (one, i)


@pytest.mark.parametrize("command", ["calibrate", "train"])
def test_help_names_every_aggregator(command):
    text = re.sub(r'"\s+"', "", source(f"lab/cli/{command}.py"))
    assert not [form for form in aggregator_forms("none", "each") if form not in text]


def test_deployment_schema_names_every_aggregator():
    told = RuleSpec.schema()["properties"]["aggregate"]["description"]
    expected = [name for name, form in AGGREGATORS.items() if form.make and name not in ("none", "each")]
    expected += [form.example for form in AGGREGATORS.values() if not form.make]
    assert not [text for text in expected if text not in told]


# -- score rules

_, FLAT = ConceptTree.build(["a", "b"], [[], []])
NAN = np.full(2, np.nan, dtype=np.float32)
RULED = {
    "asking": follows_path,
    "reference": lambda rule: scores_of_logits(torch.zeros(1, 2), FLAT, rule),
    "plan": lambda rule: CascadePlan.of(FLAT, rule, CascadeConfig(), NAN, ()),
    "auto": lambda rule: auto_threshold(rule, NAN, None),
    "exact": lambda rule: expand_thresholds(FLAT, rule, "exact", NAN, NAN, None),
}


@pytest.mark.parametrize("user", RULED)
def test_score_rule_added_only_to_the_table_is_refused(user, monkeypatch):
    monkeypatch.setattr(score_rules, "SCORE_RULES", (*SCORE_RULES, "noisy-or"))
    with pytest.raises(ConfigError, match="score_rule 'noisy-or' is not computed"):
        RULED[user]("noisy-or")


@pytest.mark.parametrize("rule", SCORE_RULES)
def test_score_rules_are_compared_in_one_place(rule):
    assert follows_path(rule) == (rule == "path")
    by_name = re.compile(rf'rule [!=]= "{rule}"')
    assert not [file for file in PACKAGE.rglob("*.py") if by_name.search(file.read_text(encoding="utf-8"))]


# -- number formats

UNKNOWN = torch.float8_e4m3fn
BY_DTYPE = {
    "code": code_of,
    "inputs": input_dtype,
    "numba": lambda dtype: check_impl("numba", torch.device("cpu"), dtype),
}


@pytest.mark.parametrize("user", BY_DTYPE)
def test_weight_format_added_only_to_the_table_is_refused(user, monkeypatch):
    monkeypatch.setitem(dtypes.WEIGHTS, "float8", UNKNOWN)
    with pytest.raises((ConfigError, KernelUnavailable), match="float8_e4m3fn"):
        BY_DTYPE[user](UNKNOWN)


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_weight_format_has_a_code_and_a_rounding(name):
    dtype = WEIGHTS[name]
    assert CODES[code_of(dtype)] is dtype and str(dtype) == f"torch.{name}"
    assert input_dtype(dtype) is (torch.bfloat16 if name == "int8" else dtype)


def test_tables_by_dtype_name_what_they_lack():
    with pytest.raises(ConfigError, match=r"no rounding of inputs of torch.int8 is known, only of torch.float32"):
        of_dtype({torch.float32: 1}, torch.int8, "rounding of inputs")


def test_dtype_option_names_every_model_format():
    from probemon.cli.options import Dtype
    from probemon.host.loading import _DTYPES

    assert not [name for name in _DTYPES if name not in Dtype.__metadata__[0].help]


# -- columns


def schema_of_sink(pa, folder):
    from probemon.monitor.sinks import ParquetSink

    sink = ParquetSink(folder / "scores.parquet")
    sink.open(["a"])
    sink.close()
    return pa.parquet.read_schema(folder / "scores.parquet")


def schema_of_routing(pa, folder):
    from probemon.adapters.routing.records import RoutingParquet

    sink = RoutingParquet(folder / "routing.parquet")
    sink.open([])
    sink.close()
    # There a level is one of degradation, by its name.
    return [field for field in pa.parquet.read_schema(folder / "routing.parquet") if field.name != "level"]


WRITERS = {
    "sink": schema_of_sink,
    "routing": schema_of_routing,
    "analysis": lambda pa, folder: schemas()["scores"],
    "summary": lambda pa, folder: schemas()["summary"],
}


@pytest.mark.parametrize("writer", WRITERS)
def test_column_has_the_same_type_in_every_file(writer, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    shared = [field for field in WRITERS[writer](pa, tmp_path) if field.name in COLUMNS]
    kinds = {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in shared}
    assert kinds and kinds == {
        name: pa.string() if COLUMNS[name] == "name" else pa.type_for_alias(COLUMNS[name]) for name in kinds
    }


def test_column_missing_from_the_table_is_an_error(monkeypatch):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match="no shared column is called 'rank'"):
        arrow_fields(pa, "rank")
    monkeypatch.setitem(columns.COLUMNS, "rank", "int9")
    with pytest.raises(ConfigError, match="'rank' is of 'int9'"):
        arrow_fields(pa, "rank")


def test_analyses_count_what_coverage_counts():
    assert set(COUNTS) <= {field.name for field in dataclasses.fields(Coverage)}
    assert set(COUNTED) == {*COUNTS, "far"} - {"shed"}
