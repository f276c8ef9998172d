"""Missing or invalid import arguments are one typed error that names them, before anything is written."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression

import foreign_files as foreign
from probemon import DynamicProbeManager
from probemon.core.probes import NORMS
from probemon.core.reference import exhaustive_reference
from probemon.errors import ConfigError, ImportRefused, UnknownSetting
from probemon.lab.importers.generic import import_safetensors, import_weights
from probemon.lab.importers.hallucination import import_head
from probemon.lab.importers.probekit import import_collection, import_file, import_probes
from probemon.lab.importers.probelab import import_files as import_probelab
from probemon.lab.importers.saelens import import_sae
from probemon.lab.importers.sklearn import import_estimators
from probemon.lab.importers.steerkit import import_files as import_steerkit

D, SITE = foreign.D, "resid_post.1"
X = foreign.states()
WEIGHT = foreign.random(D)


class Collection:
    """As probekit's ProbeCollection, of two probes."""

    normalizations = (None, None)

    def to_tensor(self):
        return torch.stack([WEIGHT, -WEIGHT]), torch.zeros(2)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a file of each format."""
    here = tmp_path_factory.mktemp("theirs")
    foreign.probelab_logistic(here / "lie.pt")
    foreign.steerkit_probe(here / "refusal.safetensors")
    foreign.sae(here / "sae")
    foreign.hallucination_head(here / "head")
    (here / "probes.json").write_text(json.dumps({"a": foreign.probekit_dict()[0]}))
    save_file({"w": WEIGHT, "b": torch.zeros(1)}, here / "w.safetensors")
    return here


ESTIMATOR = LogisticRegression().fit(X.numpy(), X[:, 0].numpy() > -2)
MAPPING = {"site": SITE, "probes": {"x": {"weight": "w", "bias": "b"}}}
# Those whose files do not say how a state is normalised: what else they need, then what calls them.
UNSAID = {
    "probelab": ({"site": SITE}, lambda here, out, **given: import_probelab(here / "lie.pt", out, **given)),
    "probekit": (
        {"site": SITE},
        lambda here, out, **given: import_probes({"a": foreign.probekit_dict()[0]}, out, **given),
    ),
    "probekit, collection": (
        {"site": SITE},
        lambda here, out, **given: import_collection(Collection(), ["a", "b"], out, **given),
    ),
    "probekit, file": ({"site": SITE}, lambda here, out, **given: import_file(here / "probes.json", out, **given)),
    "hallucination": ({}, lambda here, out, **given: import_head(here / "head", out, **given)),
    "scikit-learn": ({"site": SITE}, lambda here, out, **given: import_estimators({"a": ESTIMATOR}, out, **given)),
    "weights": ({"site": SITE}, lambda here, out, **given: import_weights({"a": (WEIGHT, 0.0)}, out, **given)),
    "safetensors": (
        {},
        lambda here, out, **given: import_safetensors(here / "w.safetensors", out, mapping=MAPPING, **given),
    ),
}
SAID = {
    "steerkit": ({}, lambda here, out, **given: import_steerkit(here / "refusal.safetensors", out, scale=1.0, **given)),
    "saelens": ({}, lambda here, out, **given: import_sae(here / "sae", out, **given)),
}
ALL = {**UNSAID, **SAID}


@pytest.mark.parametrize("source", UNSAID)
def test_unrecorded_normalisation_must_be_given(place, tmp_path, source):
    needed, run = UNSAID[source]
    for wrong in ({}, {"normalize": None}, {"normalize": "zscore"}, {"normalize": ""}):
        with pytest.raises(ImportRefused, match="'none', 'layernorm', 'rmsnorm'"):
            run(place, tmp_path / "pack", **needed, **wrong)
    assert not list(tmp_path.iterdir())
    for norm in NORMS:
        pack = run(place, tmp_path / norm, **needed, normalize=norm)
        assert [spec.norm for spec in pack.inputs] == [norm] and pack.manifest["provenance"]["import"][
            "normalize"
        ] == norm


def test_mapping_may_give_the_normalisation(place, tmp_path):
    for said, given, norm in (
        ("rmsnorm", {}, "rmsnorm"),
        ("rmsnorm", {"normalize": "none"}, "none"),
        (None, {"normalize": "layernorm"}, "layernorm"),
    ):
        mapping = MAPPING if said is None else {**MAPPING, "normalize": said}
        pack = import_safetensors(place / "w.safetensors", tmp_path / "pack", mapping=mapping, overwrite=True, **given)
        assert pack.inputs[0].norm == norm


@pytest.mark.parametrize("source", ALL)
def test_unknown_option_lists_the_existing_ones(place, tmp_path, source):
    needed, run = ALL[source]
    norm = {"normalize": "none"} if source in UNSAID else {}
    with pytest.raises(
        UnknownSetting, match=r"^import_\w+ has no option 'licens', did you mean 'licence'\?: it takes .*overwrite"
    ) as caught:
        run(place, tmp_path / "pack", **needed, **norm, licens="MIT")
    assert (
        isinstance(caught.value, TypeError)
        and "write_" not in str(caught.value)
        and ("normalize" in str(caught.value)) == (source in UNSAID)
    )
    # What an importer sets by itself is none of its options.
    for name in ("alert_threshold", "sites", "stated", "files"):
        with pytest.raises(UnknownSetting, match=f"has no option '{name}'"):
            run(place, tmp_path / "pack", **needed, **norm, **{name: None})
    assert not list(tmp_path.iterdir())
    pack = run(place, tmp_path / "pack", **needed, **norm, name="mine", licence="MIT", model="org/host")
    assert (pack.name, pack.manifest["licence"], pack.manifest["host"]["model_id"]) == ("mine", "MIT", "org/host")


WEIGHTS = {"site": SITE, "normalize": "none"}
WRONG = {
    "give a dict, ": lambda here, out: import_weights([("a", (WEIGHT, 0.0))], out, **WEIGHTS),
    "probes is a list": lambda here, out: import_probes([foreign.probekit_dict()[0]], out, **WEIGHTS),
    "names is None: give a list of names, one for each of the 2": lambda here, out: import_collection(
        Collection(), None, out, **WEIGHTS
    ),
    "names is 'ab'": lambda here, out: import_collection(Collection(), "ab", out, **WEIGHTS),
    "the mapping, .* is given as a NoneType": lambda here, out: import_safetensors(
        here / "w.safetensors", out, mapping=None
    ),
    "the mapping, .* is given as a list": lambda here, out: import_safetensors(
        here / "w.safetensors", out, mapping=[MAPPING]
    ),
    "the safetensors file is given as a NoneType": lambda here, out: import_safetensors(None, out, mapping=MAPPING),
    "the file of probes is given as a dict": lambda here, out: import_file({}, out, **WEIGHTS),
    "the source, a file, a folder or a dict of files by concept, is given as a NoneType": lambda here, out: (
        import_probelab(None, out, **WEIGHTS)
    ),
    "the file of 'a' is given as a NoneType": lambda here, out: import_steerkit({"a": None}, out, scale=1.0),
    "the dict of files is empty": lambda here, out: import_steerkit({}, out, scale=1.0),
    "the folder of the head is given as a int": lambda here, out: import_head(3, out, normalize="none"),
    "the folder of the SAE is given as a NoneType": lambda here, out: import_sae(None, out),
    "the pack's folder is given as a NoneType": lambda here, out: import_weights({"a": (WEIGHT, 0.0)}, None, **WEIGHTS),
    "site is None: give one": lambda here, out: import_weights({"a": (WEIGHT, 0.0)}, out, site=None, normalize="none"),
    "site is 3: give one": lambda here, out: import_weights({"a": (WEIGHT, 0.0)}, out, site=3, normalize="none"),
    "normalize is 3": lambda here, out: import_weights({"a": (WEIGHT, 0.0)}, out, site=SITE, normalize=3),
    "scale is given for .3, 'b'.": lambda here, out: import_steerkit(
        here / "refusal.safetensors", out, scale={3: 1.0, "b": 1.0}
    ),
    "scale is '1'": lambda here, out: import_steerkit(here / "refusal.safetensors", out, scale="1"),
    "features is 5: give a list": lambda here, out: import_sae(here / "sae", out, features=5),
    "names is .'cats'.: give a dict": lambda here, out: import_sae(here / "sae", out, names=["cats"]),
    "names is .7: 3.: give a dict": lambda here, out: import_sae(here / "sae", out, names={7: 3}),
    "sharpness is 'a'": lambda here, out: import_sae(here / "sae", out, sharpness="a"),
    "sharpness is None": lambda here, out: import_sae(here / "sae", out, sharpness=None),
    "activation_scale is '1'": lambda here, out: import_sae(here / "sae", out, activation_scale="1"),
    "centered is 'no'": lambda here, out: import_sae(here / "sae", out, centered="no"),
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_argument_is_one_error_that_names_it(place, tmp_path, message):
    with pytest.raises((ImportRefused, ConfigError), match=message):
        WRONG[message](place, tmp_path / "pack")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option",
    [
        {"name": 3},
        {"licence": None},
        {"model": 3},
        {"n_layers": "two"},
        {"eps": "small"},
        {"eps": -1.0},
        {"adapters": 3},
        {"notes": 3},
        {"notes": [object()]},
    ],
)
def test_invalid_option_type_is_refused(place, tmp_path, option):
    with pytest.raises((ImportRefused, ConfigError, ValueError), match=f"{next(iter(option))}|JSON"):
        import_weights({"a": (WEIGHT, 0.0)}, tmp_path / "pack", **WEIGHTS, **option)
    assert not list(tmp_path.iterdir())


# -- numbers that leave a probe nothing to say ---------------------------------------------------


@pytest.mark.parametrize("threshold", [1, 1.0, 2, -0.1, 1 - 2**-26, 1e200])
def test_threshold_that_no_score_or_every_score_exceeds_is_refused(place, tmp_path, threshold):
    mapping = {
        **MAPPING,
        "normalize": "none",
        "probes": {"x": {"weight": "w", "bias": "b", "alert_threshold": threshold}},
    }
    with pytest.raises(ImportRefused, match=r"x: alert_threshold is .*give a number from 0 to less than 1"):
        import_safetensors(place / "w.safetensors", tmp_path / "pack", mapping=mapping)
    assert not list(tmp_path.iterdir())


def test_empty_name_in_a_mapping_is_refused(place, tmp_path):
    mapping = {**MAPPING, "normalize": "none", "probes": {"x": {"weight": "w", "bias": "b", "name": ""}}}
    with pytest.raises(ImportRefused, match="'x': 'name' is empty: give one, or leave it out"):
        import_safetensors(place / "w.safetensors", tmp_path / "pack", mapping=mapping)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threshold", [0, 0.9, 1 - 2**-24])
def test_accepted_threshold_can_be_exceeded(place, tmp_path, threshold):
    mapping = {
        **MAPPING,
        "normalize": "none",
        "probes": {"x": {"weight": "w", "bias": "b", "alert_threshold": threshold}},
    }
    pack = import_safetensors(place / "w.safetensors", tmp_path / "pack", mapping=mapping)
    sure = 1000 * WEIGHT[None]
    assert float(pack.alert_threshold[0]) == pytest.approx(threshold, abs=1e-7) and DynamicProbeManager(
        pack
    ).score_tokens(sure).fired(0).tolist() == [0]


@pytest.mark.parametrize("sharpness", [0, -1.0, 1e-30, 9e-4, 1001, 1e30, float("inf"), float("nan"), True])
def test_sharpness_that_saturates_scores_is_refused(place, tmp_path, sharpness):
    with pytest.raises(ImportRefused, match=r"sharpness is .*: give a number from 0.001 to 1000"):
        import_sae(place / "sae", tmp_path / "pack", sharpness=sharpness)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sharpness", [1e-3, 1e3])
def test_least_and_greatest_sharpness_fire_exactly_on_active_features(tmp_path, sharpness):
    encode = foreign.sae(tmp_path / "sae", "jumprelu")
    x = foreign.states(500)
    pack, active = import_sae(tmp_path / "sae", tmp_path / "pack", sharpness=sharpness), encode(x) > 0
    found = exhaustive_reference({SITE: x}, pack)
    sure = (torch.logit(found.double()).abs() > 1e-5) | (found == 0)
    assert (
        float(sure.double().mean()) > 0.99
        and torch.equal((found > 0.5)[sure], active[sure])
        and float(found[active].max()) > 0.5
    )


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (range(10**9), "no feature 9: the SAE has features 0 to 8"),
        (itertools.count(), "no feature 9: the SAE has features 0 to 8"),
        (itertools.repeat(3), "names 3 twice"),
    ],
    ids=["range", "count", "repeat"],
)
def test_requested_features_are_validated_one_by_one(place, tmp_path, features, message):
    with pytest.raises(ImportRefused, match=message):
        import_sae(place / "sae", tmp_path / "pack", features=features)
    kept = import_sae(
        place / "sae", tmp_path / "pack", features=(i for i in (4, 2)), names={2: "cats", 5: "not asked for"}
    )
    assert [concept["id"] for concept in kept.concepts] == ["f4", "f2"]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(1, D, dtype=torch.int64),
        torch.ones(1, D, dtype=torch.complex64),
        torch.ones(1, D, dtype=torch.bool),
        torch.ones(1, D).to(torch.float8_e4m3fn),
        np.ones((1, D), dtype=np.complex128),
        [1j] * D,
    ],
    ids=["int64", "complex", "bool", "float8", "complex array", "complex list"],
)
def test_weights_of_non_float_dtypes_are_reported(tmp_path, value):
    with pytest.raises(
        ImportRefused, match=r"a: a weight or bias is torch\.(int64|complex|bool|float8)\w*, expected float16"
    ):
        import_weights({"a": (value, 0.0)}, tmp_path / "pack", **WEIGHTS)
    with pytest.raises(ImportRefused, match=r"a: a weight or bias is torch\."):
        import_weights(
            {"a": [(torch.ones(1, D), value.reshape(-1)[:1] if hasattr(value, "reshape") else value[:1])]},
            tmp_path / "pack",
            **WEIGHTS,
        )
    assert not list(tmp_path.iterdir())


def test_probe_without_layers_is_reported(place, tmp_path):
    with pytest.raises(ImportRefused, match="a: it has no layers: give weight and bias"):
        import_weights({"a": []}, tmp_path / "pack", **WEIGHTS)
    with pytest.raises(ImportRefused, match="x: it has no layers: give weight and bias"):
        import_safetensors(
            place / "w.safetensors",
            tmp_path / "pack",
            mapping={**MAPPING, "probes": {"x": {"layers": []}}},
            normalize="none",
        )


# -- what files say ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["logistic", "mass_mean", "mlp", "eemlp"])
def test_unknown_tensor_in_a_probelab_probe_is_refused(tmp_path, kind):
    getattr(foreign, f"probelab_{kind}")(tmp_path / "p.pt")
    assert import_probelab(tmp_path / "p.pt", tmp_path / "fine", **WEIGHTS).n_probes == 1
    saved = torch.load(tmp_path / "p.pt", weights_only=True)
    saved["state_dict"]["temperature"] = torch.tensor([2.0])
    torch.save(saved, tmp_path / "p.pt")
    with pytest.raises(
        ImportRefused, match=r"p\.pt holds temperature in addition to .*: its effect on a score is unknown"
    ):
        import_probelab(tmp_path / "p.pt", tmp_path / "pack", **WEIGHTS)


def test_unknown_tensor_in_a_hallucination_head_is_refused(tmp_path):
    foreign.hallucination_head(tmp_path / "head", file="probe_head.safetensors")
    path = tmp_path / "head/probe_head.safetensors"
    save_file({**load_file(path), "norm.weight": torch.ones(D)}, path)
    with pytest.raises(ImportRefused, match=r"holds norm\.weight in addition to weight, bias"):
        import_head(tmp_path / "head", tmp_path / "pack", normalize="none")


@pytest.mark.parametrize("length", [5.0, 0.98, 0.0])
def test_steerkit_direction_without_unit_length_is_refused(tmp_path, length):
    path = tmp_path / "p.safetensors"
    foreign.steerkit_probe(path)
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    save_file({**tensors, "direction.logistic": length * tensors["direction.logistic"]}, path, metadata=metadata)
    with pytest.raises(ImportRefused, match=rf"direction\.logistic has length {length:g}, but steerkit saves length 1"):
        import_steerkit(path, tmp_path / "pack", scale=3.0)
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, path, metadata=metadata
    )  # rounded, it is as long as before
    assert import_steerkit(path, tmp_path / "pack", scale=3.0).n_probes == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"schema_version": "99"},
        {"schema_version": "three"},
        {"hook_name": "blocks.9.hook_resid_post"},
        {"hook_name": "blocks.2.hook_mlp_out"},
    ],
)
def test_contradictory_steerkit_file_is_refused(tmp_path, changes):
    foreign.steerkit_probe(tmp_path / "p.safetensors", **changes)
    with pytest.raises(
        ImportRefused,
        match=(
            f"p.safetensors says schema_version .*{next(iter(changes.values()))}.*: known are 1, 2, 3, and"
            " blocks.2.hook_resid_post is the hook"
        ),
    ):
        import_steerkit(tmp_path / "p.safetensors", tmp_path / "pack", scale=1.0)
    foreign.steerkit_probe(tmp_path / "old.safetensors", schema_version="2", hook_name="")  # which no hook was named in
    assert import_steerkit(tmp_path / "old.safetensors", tmp_path / "pack", scale=1.0).sites == ["resid_post.2"]


# -- hooks of TransformerLens that are added to the stream ----------------------------------------


def sae_at(folder, hook, model):
    foreign.sae(folder, metadata={"hook_name": hook, "model_name": model})
    return folder


@pytest.mark.parametrize("part", ["attn_out", "mlp_out"])
def test_attention_and_mlp_outputs_are_sites_only_in_plain_residual_models(tmp_path, part):
    known = sae_at(tmp_path / "known", f"blocks.3.hook_{part}", "EleutherAI/pythia-70m-deduped")
    assert import_sae(known, tmp_path / "pack").sites == [f"{part}.3"]
    assert import_sae(known, tmp_path / "given", site=f"{part}.3").sites == [f"{part}.3"]
    other = sae_at(tmp_path / "other", f"blocks.3.hook_{part}", "my-own-model")
    with pytest.raises(
        ImportRefused,
        match=f"it is not known here whether my-own-model has one: give site='{part}.3' if it has none",
    ):
        import_sae(other, tmp_path / "no")
    assert import_sae(other, tmp_path / "said", site=f"{part}.3").sites == [f"{part}.3"]
    normed = sae_at(tmp_path / "normed", f"blocks.3.hook_{part}", "google/gemma-2-2b")
    for given in ({}, {"site": f"{part}.3"}):
        with pytest.raises(
            ImportRefused,
            match=f"reads blocks.3.hook_{part} of gemma-2-2b, which normalises what {part}.3 gives before that hook",
        ):
            import_sae(normed, tmp_path / "no", **given)
    for folder in (known, other):  # a hook of one place is never read at another
        with pytest.raises(ImportRefused):
            import_sae(folder, tmp_path / "no", site="resid_post.3")
    assert not (tmp_path / "no").exists()


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MODERN = {
    **SMALL,
    "intermediate_size": 24,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "max_position_embeddings": 32,
}
HOSTS = [
    ("GPT2", "gpt2-small", {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
    ("GPTNeo", "gpt-neo-125M", {"vocab_size": 32, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
    "attention_types": [[["global"], 2]]}),
    ("GPTNeoX", "EleutherAI/pythia-70m", {**SMALL, "intermediate_size": 24}),
    ("Llama", "meta-llama/Meta-Llama-3-8B", MODERN), ("Mistral", "mistral-7b", MODERN),
    ("Qwen2", "Qwen/Qwen2.5-7B", MODERN),
    ("Qwen3", "Qwen/Qwen3-8B", MODERN), ("Gemma", "google/gemma-2b", MODERN), ("Gemma2", "google/gemma-2-2b", MODERN),
    ("Gemma3Text", "google/gemma-3-1b-pt", MODERN), ("Olmo2", "allenai/OLMo-2-1124-7B", MODERN),
]  # fmt: skip


@pytest.mark.parametrize(("family", "name", "settings"), HOSTS, ids=[host[0] for host in HOSTS])
def test_listed_families_add_block_outputs_unchanged(family, name, settings):
    """A block's output is its input and what attention and feed-forward give, where nothing stands between: measured,
    of each family that is listed.
    """
    import transformers

    from probemon.host.model import find_layers, site_module
    from probemon.lab.importers import saelens

    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(getattr(transformers, f"{family}Config")(**settings)).eval()
    with torch.no_grad():  # the norms' own weights, which begin at 0 or 1
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    _, layers = find_layers(model)
    seen = {}
    for site in ("resid_post.0", "attn_out.1", "mlp_out.1", "resid_post.1"):
        site_module(layers, site).register_forward_hook(
            lambda module, given, out, site=site: seen.update({site: out[0] if isinstance(out, tuple) else out})
        )
    with torch.no_grad():
        model(torch.arange(1, 9)[None])
    added = (
        float((seen["resid_post.0"] + seen["attn_out.1"] + seen["mlp_out.1"] - seen["resid_post.1"]).abs().max()) < 1e-4
    )
    host = name.rpartition("/")[2]
    assert added == (saelens._NORMALISED_FIRST.match(host) is None)
    if family != "Gemma":  # whose names begin as those of Gemma 2 and 3: not listed, and asked for
        assert added == (saelens._ADDED_AS_GIVEN.match(host) is not None)
