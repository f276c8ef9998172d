"""Contradictions and misplaced files of a HatCat pack are reported with counts and examples."""

import os

import pytest
import torch

import hatcat_packs as theirs
from hatcat_packs import modules
from probemon.errors import ConfigError, ImportRefused, PackError
from probemon.lab.importers import hatcat_files
from probemon.lab.importers.hatcat import import_pack

D = 24


def bring(folder, target, **options):
    return import_pack(folder, target, **{"site": "resid_post.1", "normalize": "none", **options})


def write(folder, tree, **changes):
    """Linear probes for the concepts of a hierarchy, and the hierarchy."""
    probes(folder, sorted({*tree, *(child for children in tree.values() for child in children)}))
    theirs.write_hierarchy(folder, tree, **changes)


def probes(folder, keys):
    theirs.write_layered(folder, modules(["linear"], D, keys=keys))


def parents(pack):
    return {concept["id"]: set(concept["parents"]) for concept in pack.concepts}


def told(report, kind):
    note = report.note(kind)
    return () if note is None else note.examples


# -- the hierarchy -------------------------------------------------------------------------------


def write_layers(folder, *levels):
    """layer0.json and so on; of each concept what it lists below and above it, None where it has no list."""
    for level, concepts in enumerate(levels):
        content = [
            {
                "sumo_term": name,
                "layer": level,
                **({} if below is None else {"category_children": below}),
                **({} if above is None else {"parent_concepts": above}),
            }
            for name, (below, above) in concepts.items()
        ]
        theirs.write_json(folder / f"layer{level}.json", {"layer": level, "concepts": content})


def test_contradicting_layer_file_edges_are_reported_once_each(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["C:1"], "D:0": ["E:1"]})
    write_layers(
        tmp_path / "theirs",
        {"A": ([], None), "B": (["C"], None), "D": (None, None)},
        {"C": (None, ["B"]), "E": (None, ["F"])},
    )
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert (
        parents(pack)["C:1"] == {"A:0"}
        and parents(pack)["E:1"] == {"D:0"}
        and told(report, "stale") == ("B:0 is in layer0.json alone",)
    )
    assert told(report, "stale_edges") == (
        "B:0 > C is in the layer files alone",
        "F > E:1 is in the layer files alone",
        "A:0 > C:1 is in hierarchy.json alone",
        "D:0 > E:1 is in hierarchy.json alone",
    )


def test_agreeing_or_silent_layer_files_are_not_reported(tmp_path):
    tree = {"A:0": ["B:1", "C:1"], "X:0": ["C:1"]}
    write(tmp_path / "theirs", tree)
    theirs.write_layer_files(tmp_path / "theirs", tree)
    assert bring(tmp_path / "theirs", tmp_path / "same")[1].note("stale_edges") is None
    # Either end is enough: many files name one parent of several.
    write_layers(
        tmp_path / "theirs", {"A": (["B", "C"], []), "X": (["C"], None)}, {"B": (None, ["A"]), "C": (None, ["A"])}
    )
    assert bring(tmp_path / "theirs", tmp_path / "one")[1].note("stale_edges") is None
    write_layers(tmp_path / "theirs", {"A": (None, None), "X": (None, None)}, {"B": (None, None), "C": (None, None)})
    assert bring(tmp_path / "theirs", tmp_path / "none")[1].note("stale_edges") is None


def test_roots_and_leaves_contradicting_the_edges_are_reported(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["B:1"]}, root_concepts=["B:1"], leaf_concepts=["A:0"])
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack) == {"A:0": set(), "B:1": {"A:0"}}
    assert told(report, "contradicted") == (
        "A:0 is not in root_concepts, and under nothing",
        "B:1 is in root_concepts, and under A:0",
        "A:0 is in leaf_concepts, and above B:1",
        "B:1 is not in leaf_concepts, and above nothing",
    )
    for lists in ({"root_concepts": ["A:0"], "leaf_concepts": ["B:1"]}, {"root_concepts": None, "leaf_concepts": None}):
        theirs.write_hierarchy(tmp_path / "theirs", {"A:0": ["B:1"]}, **lists)
        assert bring(tmp_path / "theirs", tmp_path / "ours", overwrite=True)[1].note("contradicted") is None


def test_hierarchy_folder_without_a_hierarchy_is_refused(tmp_path):
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportRefused, match=r"empty holds no concepts: give the folder of hierarchy\.json"):
        bring(tmp_path / "theirs", tmp_path / "ours", hierarchy=tmp_path / "empty")


# -- banks ---------------------------------------------------------------------------------------


def write_bank(folder, parent, names, *, index=True, listed=None, level=1):
    place = folder / "banks" / f"layer{level}"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(
        {name: theirs.state_of(theirs.module("linear", D, i)) for i, name in enumerate(names)},
        place / f"{parent}.bank.pt",
    )
    if index:
        theirs.write_json(
            folder / "bank_index.json",
            {
                f"{parent}:{level - 1}": {
                    "bank_path": f"banks/layer{level}/{parent}.bank.pt",
                    **({} if listed is None else {"concepts": listed}),
                }
            },
        )


def test_disagreements_of_a_bank_and_its_index_are_reported(tmp_path):
    probes(tmp_path / "theirs/individual", ["Entity:0"])
    write_bank(tmp_path / "theirs", "Entity", ["Car", "Ship", "Spare"], listed=["Car", "Ship", "Boat", "Boat"])
    write_bank(tmp_path / "theirs", "Other", ["Lost"], index=False)
    theirs.write_hierarchy(tmp_path / "theirs", {"Entity:0": ["Car:1", "Ship:1", "Spare:1"]})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert set(parents(pack)) == {"Entity:0", "Car:1", "Ship:1", "Spare:1", "Lost:1"}
    assert told(report, "bank_lacks") == ("Boat of banks/layer1/Entity.bank.pt",)
    assert told(report, "bank_unlisted") == (
        "Spare of banks/layer1/Entity.bank.pt",
        "Lost of banks/layer1/Other.bank.pt",
    )
    assert (
        told(report, "bank_elsewhere") == ("Lost of banks/layer1/Other.bank.pt",) and report.note("bank_edges") is None
    )


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("layers", [True, False])
def test_edges_stated_only_by_banks_are_used(tmp_path, index, layers):
    probes(tmp_path / "theirs/individual", ["Entity:0"])
    write_bank(tmp_path / "theirs", "Entity", ["Car", "Ship"], index=index, listed=["Car", "Ship"])
    if layers:  # without edges; one child is two levels down
        write_layers(tmp_path / "theirs", {"Entity": (None, None)}, {"Car": (None, None)}, {"Ship": (None, None)})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    ship = "Ship:2" if layers else "Ship:1"
    assert (
        parents(pack) == {"Entity:0": set(), "Car:1": {"Entity:0"}, ship: {"Entity:0"}} and report.counts["edges"] == 2
    )
    assert told(report, "bank_edges") == ("Entity:0 > Car:1", f"Entity:0 > {ship}") and [
        note.kind for note in report.notes
    ] == ["bank_edges"]


def test_a_bank_on_level_0_has_no_parent(tmp_path):
    write_bank(tmp_path / "theirs", "Roots", ["Car", "Ship"], index=False, level=0)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack) == {"Car:0": set(), "Ship:0": set()} and not report.notes


def test_hierarchy_edges_override_bank_edges(tmp_path):
    probes(tmp_path / "theirs/individual", ["Entity:0", "Thing:0"])
    write_bank(tmp_path / "theirs", "Entity", ["Car"], listed=["Car"])
    theirs.write_hierarchy(tmp_path / "theirs", {"Thing:0": ["Car:1"], "Entity:0": []})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert parents(pack)["Car:1"] == {"Thing:0"} and told(report, "bank_elsewhere") == (
        "Car of banks/layer1/Entity.bank.pt",
    )


@pytest.mark.parametrize("listed", ["Car", {"Car": 1}, [1]])
def test_bank_index_without_name_lists_is_refused(tmp_path, listed):
    write_bank(tmp_path / "theirs", "Entity", ["Car"], listed=listed)
    with pytest.raises(
        ImportRefused, match=r"bank_index\.json: 'Entity:0': its concepts are .*expected a list of names"
    ):
        bring(tmp_path / "theirs", tmp_path / "ours")


def test_missing_bank_file_is_reported(tmp_path):
    write_bank(tmp_path / "theirs", "Entity", ["Car"], listed=["Car"])
    (tmp_path / "theirs/banks/layer1/Entity.bank.pt").unlink()
    with pytest.raises(ImportRefused, match=r"Entity\.bank\.pt is not there: check the path"):
        bring(tmp_path / "theirs", tmp_path / "ours")


# -- files ---------------------------------------------------------------------------------------


def test_weights_in_unexpected_places_are_reported(tmp_path):
    folder = tmp_path / "theirs"
    write(folder, {"A:0": ["B:1"]})
    elsewhere = [
        "other/C.pt",
        "layerX/F.pt",
        "layer-1/N.pt",
        "layer1001/M.PT",
        "layer0/sub/G.pt",
        "banks/x.pt",
        "individual/y.pt",
    ]
    for name in [*elsewhere, "layer0/H.PT", ".cache/hidden.pt", ".git/x/hidden.pt", "other/notes.txt"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    pack, report = bring(folder, tmp_path / "ours")
    assert pack.n_probes == 2 and told(report, "unread") == ("layer0/H.PT",)
    note = report.note("elsewhere")
    assert note.count == len(elsewhere) and set(note.examples) < set(elsewhere)
    assert "7 files of weights where this format keeps no probes: not read" in str(report)


def test_targets_of_links_already_read_are_not_reported(tmp_path):
    folder = tmp_path / "theirs"
    write(folder, {"A:0": ["B:1"]})
    (folder / "kept").mkdir()
    (folder / "layer1/B.pt").rename(folder / "kept/B.pt")
    (folder / "layer1/B.pt").symlink_to(folder / "kept/B.pt")
    (folder / "round").symlink_to(folder)
    assert bring(folder, tmp_path / "ours")[1].note("elsewhere") is None


def test_flat_and_banked_probes_are_not_reported_as_misplaced(tmp_path):
    probes_ = modules(["linear"], D, keys=["A:0", "B:0"])
    for place in ("probes/activation", "activation_lenses", "."):
        folder = tmp_path / place.replace("/", "-") / "theirs"
        folder.mkdir(parents=True)
        theirs.write_flat(folder, probes_, place=place)
        assert not bring(folder, folder.parent / "ours")[1].notes


def test_search_for_misplaced_weights_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(hatcat_files, "_MAX_LOOKED", 3)
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    for i in range(4):
        (tmp_path / f"theirs/a{i}").mkdir()
        (tmp_path / f"theirs/a{i}/x.pt").write_bytes(b"x")
    report = bring(tmp_path / "theirs", tmp_path / "ours")[1]
    assert told(report, "elsewhere") == ("a0/x.pt", "a1/x.pt", "a2/x.pt", "perhaps more, past the first 3 files")


def test_probes_widened_to_another_dtype_are_reported(tmp_path):
    made = {
        key: theirs.module("linear", D, i, dtype)
        for i, (key, dtype) in enumerate({"A:0": torch.float32, "B:0": torch.bfloat16, "C:0": torch.float16}.items())
    }
    theirs.write_layered(tmp_path / "theirs", made)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.dtype == torch.float32 and told(report, "widened") == (
        "B:0 (bfloat16 to float32)",
        "C:0 (float16 to float32)",
    )
    assert "2 probes of a narrower dtype than the pack's" in (pack.directory / "README.md").read_text()
    del made["A:0"], made["C:0"]
    theirs.write_layered(tmp_path / "one", made)
    assert not bring(tmp_path / "one", tmp_path / "half")[1].notes


def test_float64_probes_are_left_out_with_a_remedy(tmp_path):
    probes(tmp_path / "theirs", ["A:0"])
    torch.save(theirs.state_of(theirs.module("linear", D, 1, torch.float64)), tmp_path / "theirs/layer0/Double.pt")
    report = bring(tmp_path / "theirs", tmp_path / "ours")[1]
    assert r"not imported; save them again in float32 (module.float()) (Double:0 (torch.float64))" in str(report)
    (tmp_path / "theirs/layer0/A.pt").unlink()
    with pytest.raises(ImportRefused, match=r"none of its 1 probes can be imported: .*save them again in float32"):
        bring(tmp_path / "theirs", tmp_path / "no")


# -- the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("info", [{"model_info": {"num_layers": 2}}, {"num_layers": 2}])
def test_the_number_of_layers_is_kept_and_bounds_the_site(tmp_path, info):
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    theirs.write_json(tmp_path / "theirs/pack.json", info)
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert pack.manifest["host"] == {"model_id": None, "hidden_size": D, "n_layers": 2} and not report.notes
    for site in ("resid_post.2", "mlp_out.9999"):
        with pytest.raises(
            ImportRefused, match=rf"its model has 2 layers \(num_layers\), 0 to 1: none is read at site '{site}'"
        ):
            bring(tmp_path / "theirs", tmp_path / "no", site=site)


@pytest.mark.parametrize("value", [0, -3, "32", 3.5, True, 1 << 40, [1]])
@pytest.mark.parametrize("key", ["num_layers", "hidden_dim"])
def test_invalid_numbers_of_a_pack_are_reported_and_ignored(tmp_path, key, value):
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    theirs.write_json(tmp_path / "theirs/pack.json", {"model_info": {key: value}})
    pack, report = bring(tmp_path / "theirs", tmp_path / "ours")
    assert told(report, "unusable") == (f"{key} {value!r}",) and "n_layers" not in pack.manifest["host"]


@pytest.mark.parametrize(
    "site",
    [
        None,
        3,
        b"resid_post.1",
        "resid_post.99999999999999999999999",
        "resid_post." + "9" * 5000,
        "resid_post.01",
        "resid_post.1\n",
        "resid_post.١",
        "resid_post.-1",
    ],
)
def test_invalid_site_is_refused_in_few_words(tmp_path, site):
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    with pytest.raises(ConfigError, match=r"is not supported: expected resid_post\.N") as refused:
        bring(tmp_path / "theirs", tmp_path / "ours", site=site)
    assert len(str(refused.value)) < 250 and not (tmp_path / "ours").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("hierarchy", 3),
        ("name", 3),
        ("licence", None),
        ("licence", b"MIT"),
        ("model", ["org/model"]),
        ("max_bytes", "a"),
        ("max_bytes", None),
        ("max_bytes", True),
        ("progress", 3),
        ("normalize", None),
        ("normalize", ["none"]),
        ("eps", "a"),
        ("eps", None),
    ],
)
def test_invalid_argument_type_is_reported_by_name(tmp_path, name, value):
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    with pytest.raises((ConfigError, PackError), match=name):
        bring(tmp_path / "theirs", tmp_path / "ours", **{"normalize": "layernorm", name: value})
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("value", [None, 3, ["theirs"]])
def test_invalid_path_argument_is_reported_by_name(tmp_path, value):
    with pytest.raises(ConfigError, match=r"source is .*: expected a path"):
        bring(value, tmp_path / "ours")
    write(tmp_path / "theirs", {"A:0": ["B:1"]})
    with pytest.raises(ConfigError, match=r"target is .*: expected a path"):
        bring(os.fspath(tmp_path / "theirs"), value)
