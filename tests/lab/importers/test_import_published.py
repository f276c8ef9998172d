"""Probes that people publish score as in their own project, at the layer that their file means."""

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import foreign_files as foreign
from conftest import HIDDEN, LAYERS, make_model
from probemon import DynamicProbeManager
from probemon.core.reference import exhaustive_reference
from probemon.errors import ImportRefused
from probemon.lab.importers.generic import import_safetensors
from probemon.lab.importers.hallucination import import_head
from probemon.lab.importers.hatcat import import_pack
from probemon.lab.importers.lie_detectors import import_lie_detectors
from probemon.lab.importers.probekit import import_file as import_probekit
from probemon.lab.importers.probelab import import_files as import_probelab
from probemon.lab.importers.repeng import import_control_vector
from probemon.lab.importers.saelens import import_sae
from probemon.lab.importers.steerkit import import_files as import_steerkit

X = foreign.states()


def column(pack, concept, x=X):
    return exhaustive_reference({site: x for site in pack.sites}, pack)[:, pack.find(concept)].double()


def close(found, expected, bound=1e-6):
    assert float(expected.std()) > 1000 * bound  # else anything would pass
    assert float((found - expected).abs().max()) < bound


# -- lie-detectors -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", foreign.SHAPES)
def test_lie_detectors_score_and_fire_as_in_their_package(tmp_path, monkeypatch, kind):
    shape = foreign.private_enum(monkeypatch)
    theirs = foreign.lie_detector(tmp_path / "lie.pt", shape, kind, layer=5, threshold=0.7)(X)
    pack = import_lie_detectors(tmp_path / "lie.pt", tmp_path / "pack", model="org/host")
    close(column(pack, "lie"), torch.sigmoid(theirs - 0.7))
    fired = theirs > 0.7
    assert 0 < int(fired.sum()) < len(X)
    assert torch.equal(column(pack, "lie") > pack.alert_threshold[0], fired) and pack.alert_threshold.tolist() == [0.5]
    assert pack.sites == ["resid_post.5"] and pack.inputs[0].norm == "none"
    assert pack.concepts[0]["source_threshold"] == pytest.approx(0.7)
    told = pack.manifest["provenance"]["import"]
    assert told["stated"]["probes"]["lie"] == {
        "architecture": kind, "layer": 5, "threshold": pytest.approx(0.7)
    }  # fmt: skip
    assert pack.manifest["host"]["model_id"] == "org/host" and set(told["files"]) == {"lie.pt"}
    # Softer scores fire at the same states, and keep the order of those that are far from the threshold.
    soft = import_lie_detectors(tmp_path / "lie.pt", tmp_path / "soft", sharpness=0.05)
    close(column(soft, "lie"), torch.sigmoid(0.05 * (theirs - 0.7)))
    assert torch.equal(column(soft, "lie") > 0.5, fired)


def test_threshold_of_a_raw_projection_is_kept(tmp_path):
    # A sigmoid of 4,000 is 1, so a threshold of that size could not be written as a score.
    theirs = foreign.lie_detector(tmp_path / "lie.pt", None, "dim", threshold=4000.0)(X * 2000)
    pack = import_lie_detectors(tmp_path / "lie.pt", tmp_path / "pack")
    fired = theirs > 4000
    assert 0 < int(fired.sum()) < len(X) and torch.equal(column(pack, "lie", X * 2000) > 0.5, fired)


def test_folder_of_a_repository_is_its_best_checkpoint(tmp_path, monkeypatch):
    shape, repo = foreign.private_enum(monkeypatch), tmp_path / "dyl-org-host"
    theirs = foreign.lie_detector(repo / "probe.pt", shape, "lr", layer=3)(X)
    foreign.lie_detector(repo / "l_40_ar_dim.pt", shape, "dim", layer=4)
    pack = import_lie_detectors(repo, tmp_path / "all")
    assert [concept["id"] for concept in pack.concepts] == ["l_40_ar_dim", "probe"]
    assert sorted(pack.sites) == ["resid_post.3", "resid_post.4"]
    (repo / "sweep.json").write_text("{}")
    pack = import_lie_detectors(repo, tmp_path / "best")
    close(column(pack, "dyl-org-host"), torch.sigmoid(theirs - 0.7))
    assert pack.n_probes == 1 and pack.sites == ["resid_post.3"]


RUN = "raise SystemExit('the file was executed')"


class Evil:
    def __init__(self, called, *arguments):
        self.called, self.arguments = called, arguments

    def __reduce__(self):
        return self.called, self.arguments


def test_only_the_enum_is_passed_over_and_only_as_a_text(tmp_path, monkeypatch):
    shape = foreign.private_enum(monkeypatch)
    for wrong, said in (
        ({"note": Evil(exec, RUN)}, "asks for (builtins|__builtin__).exec"),
        ({"note": Evil(shape, ("lr",))}, "calls what no state dict calls"),
        ({"note": shape}, "part of a tensor by itself"),
    ):
        foreign.lie_detector(tmp_path / "lie.pt", shape, **wrong)
        with pytest.raises(ImportRefused, match=said):
            import_lie_detectors(tmp_path / "lie.pt", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize(
    "said, changes",
    {
        "states no layer, as probes of log-probabilities do": {"layer": None},
        "its layer is -1": {"layer": -1},
        "is a probe 'attention': known are dim, lr, mlp": {"probe_architecture": "attention"},
        "'probe_architecture' is 3": {"probe_architecture": 3},
        "its threshold is \\[nan\\]": {"threshold": float("nan")},
        "holds scale in addition to linear.weight": {"state": {"scale": torch.ones(1)}},
        "holds no tensor 'linear.bias'|'linear.bias' is": {"state": {"linear.bias": 3.0}},
        "12 scales are 0": {"state": {"dataset_std": torch.zeros(foreign.D)}},
        "its mean has shape .* or values that are not finite": {
            "state": {"dataset_mean": torch.full((12,), torch.nan)}
        },
    }.items(),
)
def test_unusable_lie_detectors_are_refused(tmp_path, said, changes):
    foreign.lie_detector(tmp_path / "lie.pt", None, **changes)
    with pytest.raises(ImportRefused, match=said):
        import_lie_detectors(tmp_path / "lie.pt", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


def test_too_many_weights_are_counted_before_the_next_file_is_read(tmp_path, monkeypatch):
    from probemon.lab.importers import flat

    for name in "abc":
        foreign.lie_detector(tmp_path / f"probes/{name}.pt", None, "mlp")
    (tmp_path / "probes/c.pt").write_bytes((tmp_path / "probes/c.pt").read_bytes()[:-100])
    monkeypatch.setattr(flat, "MAX_PACK_BYTES", 4 * 100)
    with pytest.raises(ImportRefused, match="make several packs"):
        import_lie_detectors(tmp_path / "probes", tmp_path / "pack")


# -- repeng --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_control_vectors_score_as_their_projections(tmp_path, dtype):
    directions = foreign.control_vector(tmp_path / "happy.gguf", [1, 2, 3, 4], dtype=dtype)
    pack = import_control_vector(tmp_path / "happy.gguf", tmp_path / "pack", layers=[1, 3], sharpness=0.5)
    assert [concept["id"] for concept in pack.concepts] == ["happy/1", "happy/3"]
    assert pack.sites == ["resid_post.1", "resid_post.3"] and bool(pack.alert_threshold.isnan().all())
    for layer in (1, 3):
        direction = torch.from_numpy(directions[layer].astype(np.float64))
        close(column(pack, f"happy/{layer}"), torch.sigmoid(0.5 * (X.double() @ direction) / direction.norm()))
    alone = import_control_vector({"joy": tmp_path / "happy.gguf"}, tmp_path / "alone", layers=[3], sharpness=0.5)
    assert torch.equal(column(alone, "joy"), column(pack, "happy/3"))
    assert alone.manifest["provenance"]["import"]["stated"]["vectors"]["joy"] == {"model_hint": "llama"}


def test_direction_after_the_final_norm_is_left_out(tmp_path):
    run = lambda layer, **given: import_control_vector(  # noqa: E731
        tmp_path / "v.gguf", tmp_path / "pack", layers=[layer], overwrite=True, **given
    )
    for layers in ([1, 2, 3], [0, 1, 2, 3]):  # repeng's default, and all: the model has 4 layers
        foreign.control_vector(tmp_path / "v.gguf", layers)
        with pytest.raises(ImportRefused, match=r"no direction for layer 3: it has (0, )?1, 2, the last layer's"):
            run(3)
        assert run(3, n_layers=5).sites == ["resid_post.3"] and run(2).sites == ["resid_post.2"]
    foreign.control_vector(tmp_path / "v.gguf", [2, 3])  # may be any of a larger model
    assert run(3).sites == ["resid_post.3"]
    with pytest.raises(ImportRefused, match="no direction for layer 3"):
        run(3, n_layers=4)


def test_unusable_control_vectors_are_refused(tmp_path):
    path = tmp_path / "v.gguf"
    for said, changes in (
        ("is a GGUF file of 'llama', not a control vector", {"arch": "llama"}),
        ("holds 'blk.2.weight': a control vector of repeng holds direction.N alone", {"names": "blk.{}.weight"}),
        ("'direction.2' is quantised or of whole numbers", {"dtype": np.int8}),
    ):
        foreign.control_vector(path, [2], **changes)
        with pytest.raises(ImportRefused, match=said):
            import_control_vector(path, tmp_path / "pack", layers=[2])
    for layers in (None, [], 2, "2", [2, 2], [-1], [True], [2.0]):
        with pytest.raises(ImportRefused, match=r"layers is .*: give numbers of layers, counted from 0, each once"):
            import_control_vector(path, tmp_path / "pack", layers=layers)
    assert not (tmp_path / "pack").exists()


def test_damaged_and_forged_gguf_files_are_refused(tmp_path):
    path = tmp_path / "v.gguf"
    foreign.control_vector(path, [2, 5])
    whole = path.read_bytes()
    begin = whole.index(b"direction.2")  # then dimensions, length, kind and place
    forged = [whole[:n] for n in range(1, len(whole) - 16, 13)]  # 16 bytes of padding end it
    for at, value in ((8, 1 << 60), (16, 1 << 60), (24, 1 << 62), (begin + 15, 1 << 61), (begin + 27, 1 << 61)):
        forged.append(whole[:at] + value.to_bytes(8, "little") + whole[at + 8 :])
    forged.append(whole[:4] + b"\0\0\0\3" + whole[8:])  # big-endian
    for bad in forged:
        path.write_bytes(bad)
        with pytest.raises(ImportRefused, match=r"GGUF file|has no direction for layer"):
            import_control_vector(path, tmp_path / "pack", layers=[5])
    # The same numbers may not be stated over and over.
    second = whole.index(b"direction.5") + 27
    path.write_bytes(whole[:second] + bytes(8) + whole[second + 8 :])
    assert import_control_vector(path, tmp_path / "pack", layers=[5]).n_probes == 1
    foreign.control_vector(path, range(40, 90), d=4)
    whole = path.read_bytes()
    for layer in range(40, 90):
        at = whole.index(f"direction.{layer}".encode()) + 16
        whole = whole[:at] + (600).to_bytes(8, "little") + whole[at + 8 :]
        whole = whole[: at + 12] + bytes(8) + whole[at + 20 :]
    path.write_bytes(whole)
    with pytest.raises(ImportRefused, match="lies outside of the file"):
        import_control_vector(path, tmp_path / "forged", layers=[50])


# -- the layer that a file means ----------------------------------------------------------------


def imported(tmp_path, source, layer, n_layers):
    """A pack of one probe of a layer, and its score of a state."""
    if source == "lie-detectors":
        theirs = foreign.lie_detector(tmp_path / "a.pt", None, "mlp", layer=layer, d=HIDDEN)
        return import_lie_detectors(tmp_path / "a.pt", tmp_path / "pack"), lambda x: torch.sigmoid(theirs(x) - 0.7)
    direction = torch.from_numpy(foreign.control_vector(tmp_path / "a.gguf", [layer], d=HIDDEN)[layer]).double()
    pack = import_control_vector(tmp_path / "a.gguf", tmp_path / "pack", layers=[layer])
    return pack, lambda x: torch.sigmoid(x.double() @ direction / direction.norm())


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("source", ["lie-detectors", "repeng"])
def test_layer_is_the_output_of_that_block(tmp_path, source, layer):
    """Both projects count blocks from 0 and read what a block gives: `hidden_states[layer + 1]`, except for the last,
    which transformers lists after the final norm.
    """
    pack, score = imported(tmp_path, source, layer, LAYERS)
    model, given = make_model(), {}
    with torch.no_grad(), DynamicProbeManager(pack).attach(model) as run:
        out = model.generate(torch.randint(3, 61, (1, 9)), max_new_tokens=4, do_sample=False, eos_token_id=None)
    model.model.layers[layer].register_forward_hook(lambda module, args, out: given.update(out=out))
    with torch.no_grad():
        listed = model(out[:, :-1], output_hidden_states=True).hidden_states
    read = given["out"][0] if isinstance(given["out"], tuple) else given["out"]
    assert torch.equal(read, listed[layer + 1]) == (layer < LAYERS - 1)
    found, expected = torch.from_numpy(run.result(out).scores.values).double().reshape(-1), score(read[0])
    close(found, expected, 3e-6)
    assert float((score(listed[layer][0]) - expected).abs().max()) > 1e-3  # the layer below would be seen


# -- tensors in several files, and in .npz -------------------------------------------------------

MAPPING = {
    "site": "resid_post.1",
    "normalize": "none",
    "standardize": {"mean": "mean", "scale": "std"},
    "probes": {
        "lie": {"weight": "lie.weight", "bias": "lie.bias"},
        "net": {"layers": [{"weight": "fc1.weight", "bias": "fc1.bias"}, {"weight": "fc2.weight"}]},
    },
}


def tensors():
    shapes = {"lie.weight": (1, 12), "lie.bias": (1,), "fc1.weight": (6, 12), "fc1.bias": (6,), "fc2.weight": (1, 6)}
    made = {name: foreign.random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    return {**made, "mean": foreign.random(12, seed=8), "std": foreign.random(12, seed=9).abs() + 0.3}


def sharded(folder, **moved):
    """A checkpoint in three files, the last of tensors that no probe needs."""
    parts = {"model-1.safetensors": ("lie", "mean"), "model-2.safetensors": ("fc", "std")}
    folder.mkdir(parents=True, exist_ok=True)
    index = {}
    for file, prefixes in parts.items():
        held = {name: tensor for name, tensor in tensors().items() if name.startswith(prefixes)}
        save_file(held, folder / file)
        index |= dict.fromkeys(held, file)
    index |= {"embed.weight": "model-3.safetensors", **moved}  # a file that was not fetched
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": index}))
    return path


def test_index_and_npz_give_the_pack_of_one_file(tmp_path):
    save_file(tensors(), tmp_path / "one.safetensors")
    expected = import_safetensors(tmp_path / "one.safetensors", tmp_path / "one", mapping=MAPPING)
    arrays = {name: tensor.numpy() for name, tensor in tensors().items()}
    arrays["fc1.weight"] = np.asfortranarray(arrays["fc1.weight"]).astype(">f4")
    np.savez(tmp_path / "plain.npz", **arrays)
    np.savez_compressed(tmp_path / "small.npz", **arrays)
    sources = {
        tmp_path / "plain.npz": {"plain.npz"},
        tmp_path / "small.npz": {"small.npz"},
        sharded(tmp_path / "sharded"): {"model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"},
    }
    for path, files in sources.items():
        pack = import_safetensors(path, tmp_path / "pack", mapping=MAPPING, overwrite=True)
        assert all(torch.equal(column(pack, name), column(expected, name)) for name in ("lie", "net"))
        assert set(pack.manifest["provenance"]["import"]["files"]) == files
    half = {name: array.astype(np.float16) for name, array in arrays.items()}
    np.savez(tmp_path / "half.npz", **half)
    save_file({name: tensor.half() for name, tensor in tensors().items()}, tmp_path / "half.safetensors")
    packs = [
        import_safetensors(tmp_path / f"half.{kind}", tmp_path / kind, mapping=MAPPING)
        for kind in ("npz", "safetensors")
    ]
    assert torch.equal(column(packs[0], "net"), column(packs[1], "net"))


def test_wrong_index_is_refused(tmp_path):
    save_file(tensors(), tmp_path / "outside.safetensors")
    for said, moved in (
        ("model-3.safetensors is not there", {"lie.weight": "model-3.safetensors"}),
        (
            "holds no tensor 'lie.weight', which model.safetensors.index.json says",
            {"lie.weight": "model-2.safetensors"},
        ),
        ("does not lie in this folder", {"lie.weight": "../outside.safetensors"}),
        ("weight_map: 'lie.weight' is 3", {"lie.weight": 3}),
    ):
        path = sharded(tmp_path / "sharded", **moved)
        with pytest.raises(ImportRefused, match=said):
            import_safetensors(path, tmp_path / "pack", mapping=MAPPING)
    path = sharded(tmp_path / "sharded")
    (tmp_path / "sharded/model-1.safetensors").unlink()
    (tmp_path / "sharded/model-1.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(ImportRefused, match="link that leads outside"):
        import_safetensors(path, tmp_path / "pack", mapping=MAPPING)
    assert not (tmp_path / "pack").exists()


def test_npz_of_other_than_floats_is_refused_and_not_run(tmp_path):
    arrays = {name: tensor.numpy() for name, tensor in tensors().items()}
    for said, wrong in (
        (r"'lie.weight' is an array of object: expected floats", np.array([Evil(exec, RUN)], dtype=object)),
        (r"'lie.weight' is an array of int64: expected floats", np.ones((1, 12), dtype=np.int64)),
        (r"'lie.weight' is an array of complex128", np.ones((1, 12), dtype=np.complex128)),
    ):
        np.savez(tmp_path / "a.npz", **{**arrays, "lie.weight": wrong})
        with pytest.raises(ImportRefused, match=said):
            import_safetensors(tmp_path / "a.npz", tmp_path / "pack", mapping=MAPPING)
    np.savez(tmp_path / "a.npz", **arrays)
    whole, member = (tmp_path / "a.npz").read_bytes(), io.BytesIO()
    np.save(member, np.ones((1, 12), dtype=np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("lie.weight.npy", member.getvalue().replace(b"(1, 12)", b"(9, 12)"))
    with pytest.raises(ImportRefused, match=r"fewer bytes than its shape \(9, 12\) states"):
        import_safetensors(tmp_path / "a.npz", tmp_path / "pack", mapping=MAPPING)
    with pytest.raises(ImportRefused, match=r"holds no tensor 'other'; it holds lie.weight, lie.bias"):
        np.savez(tmp_path / "a.npz", **arrays)
        import_safetensors(
            tmp_path / "a.npz", tmp_path / "pack", mapping={**MAPPING, "probes": {"a": {"weight": "other"}}}
        )
    (tmp_path / "a.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImportRefused, match=r"a.npz is a zip archive|a.npz cannot be read"):
        import_safetensors(tmp_path / "a.npz", tmp_path / "pack", mapping=MAPPING)
    assert not (tmp_path / "pack").exists()


# -- files of another importer -------------------------------------------------------------------

READ = {"site": "resid_post.1", "normalize": "none"}
IMPORTERS = {
    "hatcat": lambda path, out: import_pack(path, out, **READ),
    "probelab": lambda path, out: import_probelab(path, out, **READ),
    "probekit": lambda path, out: import_probekit(path, out, **READ),
    "steerkit": lambda path, out: import_steerkit(path, out, scale=1.0),
    "saelens": lambda path, out: import_sae(path, out),
    "hallucination": lambda path, out: import_head(path, out, normalize="none"),
    "lie-detectors": lambda path, out: import_lie_detectors(path, out),
    "repeng": lambda path, out: import_control_vector(path, out, layers=[1]),
    "safetensors": lambda path, out: import_safetensors(path, out, mapping=MAPPING),
}
HAND_OVER = "a pickle, and loading one runs what is in it.*: load it yourself where you trust it"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
# What a file is and what reads it, and who reads it (or says by itself what is wrong in it).
WRONG = {
    "a.npz": (r"arrays of NumPy \(\.npz\).*: probemon import safetensors reads it, with a mapping", ["safetensors"]),
    "a.npy": (r"an array of NumPy \(\.npy\).*: save it by numpy\.savez", []),
    "a.pt": (r"a file of torch\.save \(\.pt\).*probemon import lie-detectors", ["probelab", "lie-detectors"]),
    "a.gguf": (r"tensors of llama\.cpp \(GGUF\).*: probemon import repeng reads it", ["repeng"]),
    "a.pkl": (HAND_OVER, []),
    "a.joblib": (HAND_OVER, []),
    "model.safetensors.index.json": ("the index of weights in several files.*: probemon import saf", ["safetensors"]),
    "a.json": ("a JSON file.*: probemon import probekit reads", ["probekit"]),
    "a.safetensors": ("tensors of safetensors.*probemon import safetensors any", ["safetensors", "steerkit"]),
    "folder": ("it holds a.safetensors, tensors of safetensors: .*probemon import safetensors any", ["steerkit"]),
    "sae": ("probemon import saelens reads this folder", ["saelens", "steerkit"]),
    "empty.pt": ("is empty.*: fetch it again", []),
    "lfs.safetensors": ("a pointer of Git LFS, not the file itself.*: fetch the file, by git lfs pull", []),
    "lfs.pt": ("a pointer of Git LFS, not the file itself.*: fetch the file, by git lfs pull", []),
    "a.docx": ("a zip archive, as .docx.*unpack it|not a file of torch.save", []),
    "a.txt": ("a.txt ", []),
}  # fmt: skip


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    here = tmp_path_factory.mktemp("others")
    np.savez(here / "a.npz", w=np.ones(12))
    np.save(here / "a.npy", np.ones(12))
    torch.save({"w": torch.ones(12)}, here / "a.pt")
    foreign.control_vector(here / "a.gguf", [1])
    for name in ("a.pkl", "a.joblib"):
        (here / name).write_bytes(pickle.dumps({"w": 1}))
    sharded(here)
    (here / "a.json").write_text('{"a": 1}')
    save_file({"w": torch.ones(12)}, here / "a.safetensors")
    (here / "folder").mkdir()
    save_file({"w": torch.ones(12)}, here / "folder/a.safetensors")
    foreign.sae(here / "sae")
    (here / "empty.pt").touch()
    for name in ("lfs.safetensors", "lfs.pt"):
        (here / name).write_bytes(LFS)
    with zipfile.ZipFile(here / "a.docx", "w") as file:
        file.writestr("word/document.xml", "<w/>")
    (here / "a.txt").write_text("hello")
    return here


@pytest.mark.parametrize("command", IMPORTERS)
def test_every_wrong_file_is_named_in_one_line_with_its_reader(others, tmp_path, command):
    for name, (said, readers) in WRONG.items():
        if command in readers:
            continue
        with pytest.raises(ImportRefused, match=said) as caught:
            IMPORTERS[command](others / name, tmp_path / "pack")
        assert str(others / name) in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "pack").exists()
