"""A pack that is replaced, cut or overwritten while it is open keeps its scores or raises; it is never a mixture."""

import gc
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import safetensors
import torch

from conftest import HIDDEN, make_pack
from forging import forge
from fuzzing import changes, tensorfile
from fuzzing.changes import CHANGES, KEPT, PROBES, WHOLE, aged, judge_one, size_in_memory
from fuzzing.target import Wrong
from pack_changes import MODES, WHEN
from probemon import DynamicProbeManager, ProbePack
from probemon.core.probes import Architecture
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError, PackChanged, PackCorrupt, PackError, PackVersionError, ProbemonError
from probemon.packs import files as packfile
from probemon.packs import held_file as heldfile
from probemon.packs.concept_lines import read_concepts
from probemon.packs.edit import merge, rename, subset
from probemon.packs.files import check_replaceable
from probemon.packs.held_file import read_whole
from probemon.packs.held_tensors import HeldTensors
from probemon.packs.quantize import quantize
from probemon.packs.writer import PackWriter
from probemon.util.files import sha256

SCRIPT = Path(__file__).parents[1] / "support/pack_changes.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("changes"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def two(model, tmp_path_factory):
    """Two packs of equal sizes, with other weights, thresholds and definitions."""
    folder = tmp_path_factory.mktemp("two")
    for i, name in enumerate("ab"):
        concepts = [
            {
                "id": f"c{k}",
                "name": f"concept {k}",
                "parents": [f"c{k // 2}"] if k > 3 else [],
                "definition": f"in pack {name}",
            }
            for k in range(40)
        ]
        make_pack(folder / name, model, seed=i, concepts=concepts, alert_threshold=torch.full((40,), 0.25 + i / 4))
    assert (folder / "a" / PROBES).stat().st_size == (folder / "b" / PROBES).stat().st_size
    return folder / "a", folder / "b"


def test_changed_pack_keeps_its_scores_or_raises_in_every_mode(told):
    expected = [
        [
            mode,
            change,
            when,
            "same" if change in KEPT or (mode.startswith("small") and when != WHEN[0]) else "PackChanged",
        ]
        for mode in MODES
        for change in CHANGES
        for when in WHEN
    ]
    assert sorted(told["used"]) == sorted(expected)


def test_concurrent_writers_and_readers_see_whole_packs_and_leave_nothing(told):
    for outcome in told["together"]:
        assert all(re.fullmatch(r"(wrote|read) \d+", one) and int(one.split()[1]) > 1 for one in outcome["told"]), (
            outcome
        )
        assert outcome["left"] == ["pack"] and outcome["one"], outcome


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_pack_changed_between_system_calls_opens_whole_or_is_refused(two, tmp_path, change, mapped):
    """A mapped pack is not hashed: of what overwrites its weights alone before they are opened, only `verify` tells."""
    seen = set()
    for at in itertools.count():
        folder = aged(two[0], tmp_path / f"{at}")
        system = changes.System(at, lambda folder=folder: CHANGES[change](folder, two[1]))
        with size_in_memory(0 if mapped else 1 << 20), mock.patch.object(heldfile, "os", system):
            try:
                pack = ProbePack.open(folder, verify=mapped and change not in WHOLE)
                pack.weights  # noqa: B018 (read now)
            except ProbemonError as error:
                assert change not in WHOLE or (
                    change == "copy_over" and isinstance(error, PackChanged)
                )  # the last: between opening it and reading its weights
                seen.add("refused")
                continue
        seen.add(judge_one(pack, list(two)).name)
        if not system.done:
            break
    # After the last call it is the pack as it was; before the first one, what the change makes of it.
    assert at > 20 and seen == {"a"} | ({"b"} if change in WHOLE else set()) | (
        {"refused"} if change not in WHOLE or change == "copy_over" else set()
    )


def test_mixture_of_two_packs_would_be_detected(two, tmp_path):
    def mixtures():
        for at in range(40):
            folder = aged(two[0], tmp_path / f"{at}")
            try:
                with (
                    size_in_memory(0),
                    mock.patch.object(
                        heldfile,
                        "os",
                        changes.System(at, lambda folder=folder: CHANGES["exchange_all"](folder, two[1])),
                    ),
                ):
                    pack = ProbePack.open(folder)
                    pack.weights  # noqa: B018 (read now)
                judge_one(pack, list(two))
            except ProbemonError:
                pass
            except Wrong:
                yield at

    with mock.patch.object(heldfile.HeldFolder, "unchanged", lambda folder: True):
        assert list(mixtures())


def test_pack_replaced_repeatedly_while_opened_is_a_typed_error(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")

    def read(opened):
        opened.hold(PROBES)
        changes.copy_over(folder, two[1])
        return "never"

    with (
        pytest.raises(PackChanged, match="again and again while it is opened"),
        mock.patch.object(heldfile, "_WAITS", (0.0, 0.0, 0.0)),
    ):
        read_whole(folder, read)


@pytest.mark.parametrize(
    "make",
    [
        lambda pack, out: rename(pack, out, name="new"),
        lambda pack, out: merge({"a": pack, "b": pack}, out, name="both"),
        quantize,
        lambda pack, out: pack.save_pretrained(out),
    ],
)
def test_derived_pack_of_a_truncated_source_is_an_error_and_leaves_nothing(two, tmp_path, make, monkeypatch):
    monkeypatch.setattr("probemon.packs.opened._BLOCK_BYTES", 2000)
    folder, counted, real = aged(two[0], tmp_path / "pack"), [], ProbePack.check_unchanged

    def counting(pack):
        real(pack)
        counted.append(pack)
        if len(counted) == 2:
            changes.halve(folder, two[1])

    monkeypatch.setattr(ProbePack, "check_unchanged", counting)
    with size_in_memory(0):
        pack = ProbePack.open(folder)
        if make.__code__.co_names[-1:] == ("save_pretrained",):
            changes.halve(folder, two[1])
        with pytest.raises((PackChanged, PackCorrupt)):
            make(pack, tmp_path / "made")
    assert os.listdir(tmp_path) == ["pack"]


def test_copy_of_a_replaced_pack_is_refused(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    pack = ProbePack.open(folder)
    changes.replace(folder, two[1])
    with pytest.raises(PackError, match=r"open the pack again|was changed"):
        pack.save_pretrained(tmp_path / "copy")
    assert os.listdir(tmp_path) == ["pack"]


def test_derived_pack_has_its_sources_card_even_after_replacement(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    pack = ProbePack.open(folder)
    shutil.rmtree(folder)
    made = rename(pack, tmp_path / "new", name="new")
    assert "Random probes." in (made.directory / "README.md").read_text()
    assert torch.equal(made.weights["w1"], ProbePack.open(two[0]).weights["w1"])


def test_pinned_folder_replaced_while_opening_is_refused(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    pin = sha256(folder / "manifest.json")
    real = ProbePack._read.__func__

    def late(cls, opened, *arguments):
        changes.replace(folder, two[1])
        return real(cls, opened, *arguments)

    with mock.patch.object(ProbePack, "_read", classmethod(late)), pytest.raises(PackError):
        ProbePack.from_pretrained(str(folder), manifest_sha256=pin)


def test_links_permissions_and_a_moved_folder_change_nothing(two, tmp_path):
    with size_in_memory(0):
        pack = ProbePack.open(aged(two[0], tmp_path / "pack"))
        before = {name: tensor.clone() for name, tensor in pack.weights.items()}
        os.link(tmp_path / "pack" / PROBES, tmp_path / "link")
        os.chmod(tmp_path / "pack" / PROBES, 0o600)
        (tmp_path / "pack").rename(tmp_path / "moved")
        os.unlink(tmp_path / "link")
        shutil.rmtree(tmp_path / "moved")
        assert all(torch.equal(before[name], tensor) for name, tensor in pack.weights.items())


def test_overwritten_file_with_restored_times_is_detected(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    with size_in_memory(0):
        manager = DynamicProbeManager(ProbePack.open(folder), impl="cpu")
        changes.spoil(folder, two[1])
        os.utime(folder / PROBES, (1e9, 1e9))
        with pytest.raises(PackChanged, match="was written to since the pack was opened: open the pack again"):
            manager.step(None, torch.randn(1, HIDDEN))


def test_open_pack_holds_one_file_and_a_read_small_pack_none(two):
    def held():
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    before = held()
    packs = [ProbePack.open(two[0]) for _ in range(20)]
    assert held() == before + 20
    assert all(pack.weights["w1"].shape[0] == 40 for pack in packs)
    assert held() == before
    with size_in_memory(0):
        more = [ProbePack.open(two[0]) for _ in range(20)]
        assert all(pack.weights["w1"].shape[0] == 40 for pack in more)
    assert held() > before
    del more
    assert held() == before


def test_opening_reads_no_weight(two, tmp_path):
    read = []
    real = heldfile.HeldFile.read_into

    def counting(file, buffer, offset):
        if file.path.name == PROBES:
            read.append(memoryview(buffer).nbytes)
        real(file, buffer, offset)

    with mock.patch.object(heldfile.HeldFile, "read_into", counting):
        pack = ProbePack.open(two[0])
        assert sum(read) < pack.weight_bytes() / 2
        pack.weights  # noqa: B018 (read now)
        pack.golden_hidden  # noqa: B018
        assert sum(read[-1:]) == (two[0] / PROBES).stat().st_size


# -- headers -------------------------------------------------------------------------------------


def test_headers_are_accepted_exactly_when_safetensors_accepts_them(two, tmp_path):
    """Broken in hundreds of ways. What we refuse beyond it: a key that stands twice, dtypes and shapes that packs do
    not use.
    """
    data, rng, taken = (two[0] / PROBES).read_bytes(), random.Random(0), {True: 0, False: 0}
    path = tmp_path / PROBES
    for _ in range(600):
        try:
            path.write_bytes(tensorfile.break_safetensors(data, rng))
        except RecursionError:  # of a header that cannot even be written
            continue
        try:
            ours = read_whole(tmp_path, lambda folder: HeldTensors(folder.hold(PROBES)).all())
        except PackError as error:
            ours, why = None, str(error)
        try:
            with safetensors.safe_open(path, framework="np") as file:
                theirs = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (safetensors.SafetensorError, OSError):
            theirs = None
        taken[theirs is not None] += 1
        if ours is not None:
            assert theirs is not None and {name: list(tensor.shape) for name, tensor in ours.items()} == theirs
        elif theirs is not None:
            assert re.search("appears twice|packs do not use|at most 8 dimensions|codec|surrogate", why), why
    assert min(taken.values()) > 50


# -- what a pack may say -------------------------------------------------------------------------


def forged_manifest(pack, target, text):
    folder = forge(pack, target, lambda tensors: None)
    (folder / "manifest.json").write_text(text(json.loads((folder / "manifest.json").read_text())))
    return folder


SETTINGS = [
    (key, value)
    for key in (
        "load_threshold",
        "unload_threshold",
        "keep_top_k",
        "max_loaded_probes",
        "max_rounds",
        "report_top_k",
        "base_layers",
        "aggressive_pruning",
    )
    for value in (math.nan, math.inf, -math.inf, 10**400, 2**63, -1, 0, 1, True, "x", None, [], [1], {}, 0.5)
]


@pytest.mark.parametrize("key, value", SETTINGS, ids=lambda value: str(value)[:20])
def test_recommended_settings_pass_the_same_checks_as_user_settings(pack, tmp_path, key, value):
    try:
        CascadeConfig.of({key: value})
        refused = False
    except (ConfigError, ArithmeticError, TypeError):
        refused = True
    folder = forged_manifest(pack, tmp_path / "forged", lambda said: json.dumps(said | {"recommended": {key: value}}))
    if not refused:
        assert ProbePack.open(folder).recommended == {key: value}
        return
    with pytest.raises(ConfigError, match=r"manifest.json: the pack's recommended settings are not valid") as caught:
        ProbePack.open(folder)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("key, value", [("exclude", ["c1"]), ("include", ["c1"]), ("depth", {"c1": 0})], ids=str)
def test_pack_that_recommends_exclusions_is_refused(pack, tmp_path, key, value):
    folder = forged_manifest(pack, tmp_path / "forged", lambda said: json.dumps(said | {"recommended": {key: value}}))
    with pytest.raises(ConfigError, match=f"a pack cannot recommend {key}: set it when you watch"):
        ProbePack.open(folder)


def test_recommended_nan_is_refused_and_not_written(pack, model, tmp_path):
    folder = forged_manifest(
        pack, tmp_path / "forged", lambda said: json.dumps(said | {"recommended": {"load_threshold": math.nan}})
    )
    with pytest.raises(ConfigError, match="load_threshold is nan"):
        ProbePack.open(folder)
    with pytest.raises(ConfigError, match=r"'random': the pack's recommended settings .* load_threshold is nan"):
        make_pack(tmp_path / "written", model, recommended={"load_threshold": math.nan})
    assert os.listdir(tmp_path) == ["forged"]


@pytest.mark.parametrize("value", [-0.5, 1.5, math.inf, -math.inf])
@pytest.mark.parametrize("key", ["alert_threshold", "expand_threshold", "alert_threshold:ema(0.3)"])
def test_thresholds_outside_0_to_1_are_refused(pack, model, tmp_path, key, value):
    def change(tensors):
        tensors.setdefault(key, torch.full((40,), 0.5))[7] = value

    with pytest.raises(
        PackCorrupt,
        match=(
            rf"the {re.escape(key.removeprefix('alert_threshold:'))} of concept 'c\d+' is {value:g}: a threshold lies"
            r" between 0 and 1"
        ),
    ):
        ProbePack.open(forge(pack, tmp_path / "forged", change))
    thresholds = torch.full((40,), 0.5).index_fill(0, torch.tensor([7]), value)
    with pytest.raises(PackError, match=rf"of concept 'c7' is {value:g}: a threshold lies between 0 and 1"):
        make_pack(
            tmp_path / "written",
            model,
            **({"aggregated": {"ema(0.3)": thresholds}} if ":" in key else {key: thresholds}),
        )
    assert os.listdir(tmp_path) == ["forged"]


@pytest.mark.parametrize("value", [0.0, 1.0, math.nan])
def test_thresholds_of_0_1_and_nan_are_accepted(pack, tmp_path, value):
    def change(tensors):
        tensors["alert_threshold"][:] = value
        tensors["expand_threshold"][:] = value
        tensors["expand_threshold"][1] = -1  # always opened

    opened = ProbePack.open(forge(pack, tmp_path / "forged", change))
    assert (
        np.array_equal(opened.alert_threshold.numpy(), np.full(40, value, dtype=np.float32), equal_nan=True)
        and opened.expand_threshold[1] == -1
    )


@pytest.mark.parametrize("value", [1.0, True, "1", 2, 10**400, None])
def test_format_version_must_be_the_integer_one(pack, tmp_path, value):
    folder = forged_manifest(pack, tmp_path / "forged", lambda said: json.dumps(said | {"format_version": value}))
    with pytest.raises(PackVersionError, match="format_version is") as caught:
        ProbePack.open(folder)
    assert len(str(caught.value)) < 400


def test_huge_size_is_reported_in_a_short_message(pack, tmp_path):
    def text(said):
        said["files"]["README.md"]["size"] = 10**400
        return json.dumps(said)

    with pytest.raises(PackCorrupt, match=r"'README.md' has size 10{39}, and no file has that") as caught:
        ProbePack.open(forged_manifest(pack, tmp_path / "forged", text))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["a\u202egnp.exe", "a\u2066b", "\u202a", "\ud800", "a\x1b[2J"], ids=ascii)
def test_names_with_hidden_or_control_characters_are_refused(pack, model, tmp_path, name):
    folder = forged_manifest(pack, tmp_path / "forged", lambda said: json.dumps(said | {"name": name}))
    with pytest.raises(PackCorrupt, match=r"the name is '.*\\|is not valid JSON .*surrogates"):
        ProbePack.open(folder)
    (folder / "concepts.jsonl").write_text(json.dumps({"id": "a", "name": name, "level": 0, "parents": []}) + "\n")
    with pytest.raises(PackCorrupt, match=r"line 1: name is '.*\\|line 1 is not valid JSON .*surrogates"):
        read_concepts(folder / "concepts.jsonl")
    with pytest.raises(PackError, match=r"the pack's name is '.*\\"):
        make_pack(tmp_path / "written", model, name=name)


def test_right_to_left_names_are_accepted(model, tmp_path):
    assert make_pack(tmp_path / "pack", model, name="חיות \u200falef").name == "חיות \u200falef"


def test_duplicate_json_keys_are_refused(pack, tmp_path):
    folder = forged_manifest(
        pack,
        tmp_path / "forged",
        lambda said: json.dumps(said).replace('"licence":', '"licence": "MIT", "licence":', 1),
    )
    with pytest.raises(PackCorrupt, match=r"manifest.json is not valid JSON .*'licence' appears twice"):
        ProbePack.open(folder)
    path = tmp_path / "concepts.jsonl"
    path.write_text('{"id": "a", "name": "a", "level": 0, "parents": [], "parents": ["b"]}\n')
    with pytest.raises(PackCorrupt, match=r"line 1 is not valid JSON .*'parents' appears twice"):
        read_concepts(path)


def test_millions_of_json_lists_are_refused_before_parsing(tmp_path):
    path = tmp_path / "concepts.jsonl"
    path.write_text('{"id": "a", "name": "a", "level": 0, "parents": [' + "[]," * 4_000_000 + "[]]}\n")
    with pytest.raises(PackCorrupt, match="4,000,003 brackets, at most 4,000,000 lists and objects are read"):
        read_concepts(path)


def test_empty_packs_are_neither_written_nor_opened(model, tmp_path):
    with pytest.raises(PackError, match="a pack has one probe or more"):
        make_pack(tmp_path / "none", model, n=0)
    with pytest.raises(PackError, match="a pack has one probe or more, and none is empty"):
        PackWriter(
            tmp_path / "flat",
            name="flat",
            concepts=[{"id": "a", "name": "a", "parents": []}],
            architecture=Architecture(0),
            dtype=torch.float32,
            score_rule="independent",
            inputs=[{"site": "resid_post.1"}],
            host={},
            licence="",
            card="",
        )
    assert os.listdir(tmp_path) == []


def test_file_without_read_permission_is_reported(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    real = os.open

    def refusing(path, *arguments, **named):
        if str(path).endswith(PROBES):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **named)

    with (
        mock.patch.object(os, "open", refusing),
        pytest.raises(
            PackError, match=r"probes.safetensors cannot be read \(Permission denied\): check its permissions"
        ),
    ):
        ProbePack.open(folder)


def test_pipe_in_place_of_a_file_is_refused_without_waiting(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    (folder / PROBES).unlink()
    os.mkfifo(folder / PROBES)
    errors = []

    def opening():
        try:
            ProbePack.open(folder)
        except ProbemonError as error:
            errors.append(str(error))

    thread = threading.Thread(target=opening, daemon=True)
    thread.start()
    thread.join(10)
    assert len(errors) == 1 and "it is not a file" in errors[0]


# -- replacing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")], ids=str
)
def test_failed_replacement_keeps_the_old_pack_and_reports_the_first_error(
    two, tmp_path, model, exchange, error, monkeypatch
):
    folder = aged(two[0], tmp_path / "pack")
    monkeypatch.setattr(packfile, "_rename", (lambda *arguments: -1) if exchange else None)
    real = Path.rename

    def failing(path, target):
        if Path(target) == folder and "-old-" not in path.name:
            raise error
        return real(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PackError, match=error.strerror):
        make_pack(folder, model, seed=5, overwrite=True)
    assert os.listdir(tmp_path) == ["pack"] and judge_one(ProbePack.open(folder), [two[0]])


def test_writer_during_a_replacement_leaves_only_the_last_pack(two, tmp_path, monkeypatch):
    """Where names cannot be exchanged: the place is taken by somebody else at the moment when it is free."""
    folder, made = aged(two[0], tmp_path / "pack"), aged(two[1], tmp_path / ".made")
    monkeypatch.setattr(packfile, "_rename", None)
    real, taken = Path.rename, []

    def racing(path, target):
        real(path, target)
        if path == folder and not taken:
            taken.append(shutil.copytree(two[0], folder))

    monkeypatch.setattr(Path, "rename", racing)
    packfile.replace_directory(made, folder)
    assert taken and os.listdir(tmp_path) == ["pack"] and judge_one(ProbePack.open(folder), list(two)) == two[1]


def test_check_for_changes_takes_microseconds(two):
    """The cost on a step: a call of the system. A bound fifty times as high, for a machine that others use."""
    import time

    with size_in_memory(0):
        pack = ProbePack.open(two[0])
        taken = []
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                pack.check_unchanged()
            taken.append((time.perf_counter() - begin) / 200)
    assert min(taken) < 100e-6


def test_subset_of_a_loaded_pack_needs_no_file(two, tmp_path):
    folder = aged(two[0], tmp_path / "pack")
    pack = ProbePack.open(folder)
    pack.weights  # noqa: B018 (read now)
    shutil.rmtree(folder)
    made = subset(pack, tmp_path / "part", ["c5"])
    assert {concept["id"] for concept in made.concepts} >= {"c5", "c2"}


def test_overwritten_mapped_pack_with_kept_times_is_detected_by_permissions(two, tmp_path):
    """As `cp -p` does from an archive in which every file has one time: size and time are the same, the permissions are
    not.
    """
    first, second = (aged(folder, tmp_path / f"pack {i}") for i, folder in enumerate(two))
    with size_in_memory(0):
        pack = ProbePack.open(first)
        manager, hidden = DynamicProbeManager(pack), torch.randn(3, pack.architecture.hidden_size)
        before = manager.score_tokens(hidden)
        os.chmod(first / PROBES, 0o600)  # alone it says nothing of what is in the file
        assert np.array_equal(manager.score_tokens(hidden).values, before.values)
        data, times = (second / PROBES).read_bytes(), os.stat(first / PROBES)
        assert len(data) == times.st_size
        with open(first / PROBES, "r+b") as file:
            file.write(data)
        os.utime(first / PROBES, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.chmod(first / PROBES, 0o640)
        with pytest.raises(PackChanged):
            manager.score_tokens(hidden)


def test_folder_that_appears_during_the_check_is_not_called_a_file(two, tmp_path, monkeypatch):
    shutil.copytree(two[0], tmp_path / "pack")
    is_dir, gone = Path.is_dir, [tmp_path / "pack"]

    def first_gone(path, **options):
        return False if path in gone and not gone.clear() else is_dir(path, **options)

    monkeypatch.setattr(Path, "is_dir", first_gone)
    check_replaceable(tmp_path / "pack")
    for name, make in (("file", Path.touch), ("link", lambda path: path.symlink_to(two[0]))):
        make(tmp_path / name)
        with pytest.raises(PackError, match=f"is a {name}, not a pack"):
            check_replaceable(tmp_path / name)


@pytest.mark.parametrize("mapped", [True, False])
def test_weights_that_do_not_fit_in_memory_are_a_pack_error(tmp_path, mapped):
    """As under `ulimit -v`."""
    shape = [1 << 20, 1 << 10]
    header = json.dumps({"w1": {"dtype": "U8", "shape": shape, "data_offsets": [0, 1 << 30]}}).encode()
    with (tmp_path / PROBES).open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 30))  # a hole
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    with size_in_memory(0 if mapped else 2 << 30), heldfile.HeldFolder(tmp_path) as folder:
        tensors = HeldTensors(folder.hold(PROBES))
        resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), before[1]))
        try:
            with pytest.raises(
                PackError, match=r"does not fit into the memory .*1,073,741,9.* bytes\): raise its limit"
            ):
                tensors.all()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
