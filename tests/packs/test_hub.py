"""Packs travel to a hub and back with every byte checked; each failure of hub, network or cache is one error."""

import hashlib
import json
import re
import shutil
import sys

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, ModelCard, constants

from conftest import make_pack
from hub_stand_in import HubStandIn
from probemon import ProbePack
from probemon.cli.app import main
from probemon.errors import ConfigError, PackCorrupt, PackError
from probemon.packs import files as packfile
from probemon.packs.edit import rename

# huggingface_hub's own uploads without Xet use its HTTP client in a way that the client deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

FILES = ("manifest.json", "concepts.jsonl", "probes.safetensors", "README.md")
REPO = "org/probes"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in speaks LFS
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)  # whoever runs this keeps their token
    with HubStandIn(tmp_path / "hub") as stand_in:
        yield stand_in
    huggingface_hub.close_session()


@pytest.fixture
def fetch(hub, tmp_path):
    def fetch(repo=REPO, **how):
        return ProbePack.from_pretrained(repo, **{"cache_dir": tmp_path / "cache", "endpoint": hub.url, **how})

    return fetch


@pytest.fixture
def saved(pack, tmp_path):
    """What a push of `pack` sends, as bytes by file."""
    folder = pack.save_pretrained(tmp_path / "saved").directory
    return {file: (folder / file).read_bytes() for file in FILES}


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def same(a, b):
    """Two packs hold the same probes, bit for bit, and say the same of them."""
    said = [{key: value for key, value in one.manifest.items() if key != "files"} for one in (a, b)]
    bits = all(torch.equal(a.weights[key].view(torch.uint8), b.weights[key].view(torch.uint8)) for key in a.weights)
    return said[0] == said[1] and a.concepts == b.concepts and a.weights.keys() == b.weights.keys() and bits


def downloads(hub):
    return [
        request
        for request in hub.requests
        if request.startswith("GET") and ("/resolve/" in request or "/storage/" in request)
    ]


# -- there and back ------------------------------------------------------------------------------


def test_pushed_pack_is_fetched_by_branch_tag_and_commit(hub, fetch, pack, model, tmp_path):
    first = pack.push_to_hub(REPO, token=hub.token, endpoint=hub.url)
    HfApi(endpoint=hub.url, token=hub.token).create_tag(REPO, tag="v1")
    other = make_pack(tmp_path / "other", model, seed=5)
    second = other.push_to_hub(REPO, token=hub.token, endpoint=hub.url, commit_message="better")
    assert (
        first.commit != second.commit
        and first.url == f"{hub.url}/{REPO}/commit/{first.commit}"
        and first.pull_request is None
    )
    for i, (revision, expected) in enumerate(
        {None: other, "main": other, "v1": pack, first.commit: pack, second.commit: other}.items()
    ):
        found = fetch(revision=revision, cache_dir=tmp_path / str(i), verify=True)
        assert (
            same(found, expected)
            and found.golden_error == 0.0
            and not same(found, pack if expected is other else other)
        )
        assert found.directory.name == (second if expected is other else first).commit
        for file in ("concepts.jsonl", "probes.safetensors"):
            assert (found.directory / file).read_bytes() == (expected.directory / file).read_bytes()


def test_push_is_one_commit_and_pushing_the_same_again_is_none(hub, pack, saved):
    pushed = pack.push_to_hub(REPO, token=hub.token, endpoint=hub.url)
    assert {file: hub.read(REPO, file) for file in FILES} == saved
    assert (
        set(hub.repositories[REPO].commits[pushed.commit]) == {*FILES, ".gitattributes"}
        and len(hub.repositories[REPO].commits) == 2
    )
    assert pushed.manifest_sha256 == sha256(saved["manifest.json"])
    assert pack.push_to_hub(REPO, token=hub.token, endpoint=hub.url) == pushed
    assert len(hub.repositories[REPO].commits) == 2


def test_push_to_a_branch_pull_request_or_private_repository(hub, fetch, pack):
    how = {"token": hub.token, "endpoint": hub.url}
    pushed = pack.push_to_hub(REPO, revision="trial", private=True, **how)
    repository = hub.repositories[REPO]
    assert (
        repository.private
        and repository.refs["trial"] == pushed.commit
        and set(repository.commits[repository.refs["main"]]) == {".gitattributes"}
    )
    asked = pack.push_to_hub(REPO, create_pr=True, **how)
    assert (
        asked.pull_request == f"{hub.url}/{REPO}/discussions/1"
        and repository.refs["refs/pr/1"] == asked.commit != repository.refs["main"]
    )
    assert same(fetch(revision="refs/pr/1", token=hub.token), pack)
    with pytest.raises(PackError, match=r"or a private one: check the name, or log in by `hf auth login`"):
        fetch(revision="trial", cache_dir=hub.folder / "elsewhere")


def test_only_pack_files_are_fetched(hub, fetch, pack, saved):
    hub.put(REPO, {**saved, "model.pt": b"a pickle", "more/manifest.json": b"{}", "run.py": b"raise SystemExit"})
    found = fetch()
    assert same(found, pack) and sorted(path.name for path in found.directory.rglob("*")) == sorted(FILES)
    assert len(downloads(hub)) == len(FILES)


def test_another_version_fetches_only_what_differs(hub, fetch, saved):
    hub.put(REPO, saved)
    fetch()
    n = len(downloads(hub))
    card = saved["README.md"] + b"One more line.\n"
    manifest = json.loads(saved["manifest.json"])
    manifest["files"]["README.md"] = {"sha256": sha256(card), "size": len(card)}
    hub.put(REPO, {"README.md": card, "manifest.json": json.dumps(manifest).encode()})
    assert (fetch().directory / "README.md").read_bytes() == card
    assert [request.rsplit("/", 1)[1] for request in downloads(hub)[n:]] == ["manifest.json", "README.md"]


def test_branch_that_moves_during_a_fetch_gives_the_first_version(hub, fetch, pack, saved, tmp_path, model):
    hub.put(REPO, saved)
    newer = make_pack(tmp_path / "newer", model, seed=5)

    def asked(request):
        if request.startswith("GET") and request.endswith("/manifest.json"):
            hub.asked = lambda request: None
            hub.put(REPO, {file: (newer.directory / file).read_bytes() for file in FILES})

    hub.asked = asked
    assert same(fetch(), pack) and same(fetch(), newer)


def test_alert_set_that_is_not_saved_is_refused_instead_of_lost(tmp_path):
    shipped = ProbePack.open("probes/wordnet-smollm2-135m")
    other = shipped.with_alert_set("rate_0.01")
    with pytest.raises(ConfigError, match=r"'rate_0.01' is in force, and the files of .* recommend 'precision_0.9'"):
        other.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    written = rename(other, tmp_path / "renamed", name="renamed").save_pretrained(tmp_path / "copy")
    assert written.alert_set == "rate_0.01" and torch.equal(written.alert_threshold, other.alert_threshold)


# -- the card ------------------------------------------------------------------------------------


def test_saved_card_has_hub_metadata_and_the_manifest_its_hash(pack, tmp_path):
    copy = pack.save_pretrained(tmp_path / "copy")
    card = ModelCard.load(tmp_path / "copy" / "README.md")
    assert card.data.to_dict() == {
        "library_name": "probemon",
        "license": "cc0-1.0",
        "tags": ["probemon", "concept-probes", "interpretability"],
    }
    assert card.text.strip() == "Random probes."
    assert same(ProbePack.open(copy.directory, verify=True), pack)
    text = (copy.directory / "README.md").read_bytes()
    assert copy.manifest["files"]["README.md"] == {"sha256": sha256(text), "size": len(text)}
    assert {file: copy.manifest["files"][file] for file in FILES[1:3]} == {
        file: pack.manifest["files"][file] for file in FILES[1:3]
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"] and sorted(
        path.name for path in copy.directory.iterdir()
    ) == sorted(FILES)


def test_copy_of_a_copy_is_identical(pack, tmp_path):
    once = pack.save_pretrained(tmp_path / "once")
    once.save_pretrained(tmp_path / "twice")
    once.save_pretrained(tmp_path / "once", overwrite=True)  # onto itself
    for file in FILES:
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()


@pytest.mark.parametrize(
    ("licence", "host", "expected"),
    [
        (
            "Apache-2.0",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
            {"license": "apache-2.0", "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        ),
        ("MIT AND CC0-1.0", "/models/llama", {"license": "other", "license_name": "mit-and-cc0-1.0"}),
        (
            "WordNet 3.1 licence (names; notice in README.md)",
            "a/b/c",
            {"license": "other", "license_name": "wordnet-3.1-licence-names-notice-in-readme.md"},
        ),
        ("?!", "./gpt2", {"license": "other", "license_name": "other"}),
        ("", None, {}),
    ],
)
def test_licence_and_model_are_named_as_the_hub_names_them(model, tmp_path, licence, host, expected):
    made = make_pack(tmp_path / "pack", model, licence=licence, host={"model_id": host})
    data = ModelCard.load(made.save_pretrained(tmp_path / "copy").directory / "README.md").data.to_dict()
    assert {key: data[key] for key in data if key not in ("library_name", "tags")} == expected


def test_authors_card_metadata_is_kept(model, tmp_path):
    card = "---\nlicense: mit\ntags:\n- whales\nlanguage: en\nbase_model: org/theirs\n---\n# Whales é\n\n---\nrule\n"
    made = make_pack(tmp_path / "pack", model, card=card, host={"model_id": "org/ours"}).save_pretrained(
        tmp_path / "copy"
    )
    found = ModelCard.load(made.directory / "README.md")
    tags = ["whales", "probemon", "concept-probes", "interpretability"]
    assert found.data.to_dict() == {
        "license": "mit",
        "tags": tags,
        "language": "en",
        "base_model": "org/theirs",
        "library_name": "probemon",
    }
    assert found.text == "# Whales é\n\n---\nrule\n"


@pytest.mark.parametrize("card", ["---\na: [\n---\n", "---\nonly text\n---\n", "---\nmodel-index: 3\n---\n"])
def test_unreadable_metadata_is_one_error_and_writes_nothing(model, tmp_path, card):
    made = make_pack(tmp_path / "pack", model, card=card)
    with pytest.raises(PackError, match=r"README.md cannot be given metadata \(.+\): begin it with a heading"):
        made.save_pretrained(tmp_path / "copy")
    assert [path.name for path in tmp_path.iterdir()] == ["pack"]


def test_copy_replaces_nothing_unasked_and_damaged_packs_are_refused(hub, model, tmp_path):
    made = make_pack(tmp_path / "pack", model)
    (tmp_path / "copy").mkdir()
    with pytest.raises(PackError, match=r"copy exists: choose another path, or overwrite it"):
        made.save_pretrained(tmp_path / "copy")
    probes = tmp_path / "pack" / "probes.safetensors"
    changed = bytearray(probes.read_bytes())
    changed[-1] ^= 1
    probes.write_bytes(changed)
    with pytest.raises(PackCorrupt, match=r"pack/probes.safetensors was changed"):
        made.save_pretrained(tmp_path / "copy", overwrite=True)
    with pytest.raises(PackCorrupt, match=r"pack/probes.safetensors was changed"):
        made.push_to_hub(REPO, token=hub.token, endpoint=hub.url)
    assert (
        hub.requests == []
        and not list((tmp_path / "copy").iterdir())
        and sorted(path.name for path in tmp_path.iterdir()) == ["copy", "hub", "pack"]
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(PackError, match=r"copy cannot be written: .+ is a file; choose another path"):
        make_pack(tmp_path / "whole", model).save_pretrained(tmp_path / "file" / "copy")


# -- every byte ----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_changed_byte_is_detected_and_fetched_again(hub, fetch, pack, saved, file):
    hub.put(REPO, saved)
    changed = bytearray(saved[file])
    if file == "manifest.json":  # one digit of a hash, so that it can still be read
        at = saved[file].index(b'"sha256": "') + len('"sha256": "')
        changed[at] = ord("0") if changed[at] != ord("0") else ord("1")
    else:
        changed[len(changed) // 2] ^= 1
    hub.replace(REPO, file, changed)
    for _ in range(2):  # it is not taken from the cache the second time
        with pytest.raises(
            PackCorrupt, match=r"was changed: sha256 \w+..., the manifest says \w+...: fetch the pack again"
        ):
            fetch()
    hub.replace(REPO, file, saved[file])
    assert same(fetch(), pack)


def test_pin_verifies_the_manifest_and_every_byte(hub, fetch, pack, saved):
    pin = pack.push_to_hub(REPO, token=hub.token, endpoint=hub.url).manifest_sha256
    assert same(fetch(manifest_sha256=pin.upper()), pack)
    # A publisher who is no longer who they were: another pack, whole in itself, under the same name.
    forged = json.loads(saved["manifest.json"])
    forged["name"] = "forged"
    hub.put(REPO, {"manifest.json": json.dumps(forged).encode()})
    assert fetch().name == "forged"
    for cache in ("cache", "elsewhere"):
        with pytest.raises(PackCorrupt, match=rf"has sha256 \w{{64}}, not the {pin} that was asked for"):
            fetch(manifest_sha256=pin, cache_dir=hub.folder / cache)
    assert not [
        request for request in downloads(hub)[-1:] if "manifest.json" not in request
    ]  # and nothing more was fetched


def test_wrong_pin_removes_nothing_from_the_cache(hub, fetch, pack, saved):
    hub.put(REPO, saved)
    fetch()
    hub.stop()
    with pytest.raises(PackCorrupt, match="that was asked for"):
        fetch(manifest_sha256="0" * 64)
    assert same(fetch(manifest_sha256=sha256(saved["manifest.json"])), pack)


@pytest.mark.parametrize("pin", ["", "abc", "g" * 64, "0" * 63])
def test_pin_that_is_not_a_sha256_is_refused(pack, pin):
    with pytest.raises(ConfigError, match="give all 64 hex digits"):
        ProbePack.from_pretrained(str(pack.directory), manifest_sha256=pin)


def test_pin_is_checked_for_a_folder_too(pack, tmp_path):
    copy = shutil.copytree(pack.directory, tmp_path / "copy")
    pin = sha256((copy / "manifest.json").read_bytes())
    assert same(ProbePack.from_pretrained(str(copy), manifest_sha256=pin), pack)
    with pytest.raises(PackCorrupt, match="that was asked for"):
        ProbePack.from_pretrained(str(copy), manifest_sha256="0" * 64)
    card = copy / "README.md"
    card.write_text(card.read_text().replace("Random", "random"))
    assert ProbePack.from_pretrained(str(copy)).n_probes == pack.n_probes
    with pytest.raises(PackCorrupt, match=r"README.md was changed"):
        ProbePack.from_pretrained(str(copy), manifest_sha256=pin)
    (copy / "manifest.json").unlink()
    with pytest.raises(PackError, match=r"holds no manifest.json: it is not a probe pack"):
        ProbePack.from_pretrained(str(copy), manifest_sha256=pin)


def test_download_is_hashed_once_and_a_pinned_one_each_time(hub, fetch, saved, monkeypatch):
    hub.put(REPO, saved)
    hashed = []
    check = packfile.check_hash
    monkeypatch.setattr(
        packfile, "check_hash", lambda path, expected: (hashed.append(path.name), check(path, expected))
    )
    fetch()
    assert sorted(hashed) == sorted(FILES[1:])
    fetch()
    assert len(hashed) == 3
    pin = sha256(saved["manifest.json"])
    found = fetch(manifest_sha256=pin)
    assert len(hashed) == 6
    blob = (found.directory / "concepts.jsonl").resolve()
    blob.write_bytes(blob.read_bytes().replace(b"concept 1", b"Concept 1", 1))
    with pytest.raises(PackCorrupt, match=r"concepts.jsonl was changed"):
        fetch(manifest_sha256=pin)
    assert fetch(manifest_sha256=pin).concepts == found.concepts  # fetched anew


def test_interrupted_hash_check_leaves_nothing_trusted(hub, fetch, pack, saved, monkeypatch):
    hub.put(REPO, saved)
    hub.replace(REPO, "concepts.jsonl", saved["concepts.jsonl"].replace(b"concept 1", b"Concept 1", 1))

    def interrupt(path, expected):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(packfile, "check_hash", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch()
    with pytest.raises(PackCorrupt, match=r"concepts.jsonl was changed"):
        fetch()


@pytest.mark.parametrize("file", FILES[1:])
def test_truncated_file_is_detected_before_or_after_the_download(hub, fetch, pack, saved, file):
    hub.put(REPO, saved)
    hub.replace(REPO, file, saved[file][:-9], stated=len(saved[file]) - 9)  # the hub says so itself
    n = len(downloads(hub))
    with pytest.raises(
        PackCorrupt,
        match=(
            rf"has {len(saved[file]) - 9} bytes of {file}, its manifest says {len(saved[file])}: nothing of it was"
            r" fetched"
        ),
    ):
        fetch()
    assert [request.rsplit("/", 1)[1] for request in downloads(hub)[n:]] == ["manifest.json"]
    hub.replace(REPO, file, saved[file][:-9], stated=len(saved[file]))  # it does not
    with pytest.raises(PackError, match=rf"{len(saved[file]) - 9}"):
        fetch()
    hub.replace(REPO, file, saved[file])
    assert same(fetch(), pack)


def test_interrupted_download_is_resumed(hub, fetch, pack, saved):
    hub.put(REPO, saved)
    hub.break_once = len(saved["probes.safetensors"]) // 3
    assert same(fetch(verify=True), pack)
    assert hub.break_once == 0 and sum("/storage/" in request for request in downloads(hub)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"probes.safetensors": 1 << 50},
            r"has \d+ bytes of probes.safetensors, its manifest says 1125899906842624: nothing of it was fetched",
        ),
        ({"model.pt": 5}, r"manifest.json lists 'model.pt', which is not a file of a pack"),
        ({"../evil": 5}, r"file '../evil' is outside the pack"),
    ],
)
def test_manifest_with_missing_or_huge_files_fetches_nothing(hub, fetch, saved, change, message):
    manifest = json.loads(saved["manifest.json"])
    manifest["files"] |= {file: {"sha256": "0" * 64, "size": size} for file, size in change.items()}
    hub.put(REPO, {**saved, "manifest.json": json.dumps(manifest).encode(), "model.pt": b"12345"})
    with pytest.raises(PackCorrupt, match=message):
        fetch()
    assert len(downloads(hub)) == 1


def test_repository_without_a_listed_file_fetches_nothing(hub, fetch, saved):
    hub.put(REPO, {file: saved[file] for file in FILES[:2]})
    with pytest.raises(PackCorrupt, match=r"has no (probes.safetensors|README.md), its manifest says"):
        fetch()
    assert len(downloads(hub)) == 1


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"{", b"\xff", b"[1]", b'{"format": "probemon-pack", "format_version": 99}', b"1" * 9999]
)
def test_invalid_manifest_is_one_error(hub, fetch, saved, text):
    hub.put(REPO, {**saved, "manifest.json": text})
    with pytest.raises(PackError, match=r"manifest.json"):
        fetch()
    assert len(downloads(hub)) == 1


# -- without the hub -----------------------------------------------------------------------------


@pytest.mark.parametrize("away", ["refused", "HF_HUB_OFFLINE", "local_files_only"])
def test_fetched_pack_opens_without_the_hub(hub, fetch, pack, saved, monkeypatch, tmp_path, away):
    commit = hub.put(REPO, saved)
    fetch()
    how = {"local_files_only": away == "local_files_only"}
    if away == "refused":
        hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", away == "HF_HUB_OFFLINE")
    hub.requests.clear()
    for revision in (None, "main", commit):
        assert same(fetch(revision=revision, manifest_sha256=sha256(saved["manifest.json"]), verify=True, **how), pack)
    told = {
        "refused": r"not whole in the cache, and the hub cannot be reached \(.+\): check the connection",
        "HF_HUB_OFFLINE": r"in the cache, and the hub may not be asked: unset HF_HUB_OFFLINE once, or give a folder$",
        "local_files_only": r"not whole in the cache, and the hub may not be asked: leave out local_files_only once",
    }[away]
    for other in ({"repo": "org/other"}, {"revision": "v9"}, {"cache_dir": tmp_path / "empty"}):
        with pytest.raises(PackError, match=told):
            fetch(**other, **how)
    assert hub.requests == []
    with pytest.raises(PackError, match=rf"'{REPO}' .+: (check the connection|unset it)"):
        pack.push_to_hub(REPO, token=hub.token, endpoint="http://127.0.0.1:9")


@pytest.mark.parametrize("away", ["refused", "HF_HUB_OFFLINE", "local_files_only"])
def test_incomplete_pack_in_the_cache_is_reported(hub, fetch, saved, monkeypatch, away):
    hub.put(REPO, saved)
    found = fetch()
    blob = (found.directory / "concepts.jsonl").resolve()
    (found.directory / "concepts.jsonl").unlink()
    blob.unlink()
    if away == "refused":
        hub.stop()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", away == "HF_HUB_OFFLINE")
    with pytest.raises(PackError, match=rf"'{REPO}'.+(check the connection|may not be asked|unset it)"):
        fetch(local_files_only=away == "local_files_only")


# -- what can be wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"repo": "org/nothing"},
            r"'org/nothing' is not a folder, and the hub has no such repository, or a private one: check the name",
        ),
        ({"repo": "org/nothing", "token": HubStandIn.token}, r"the hub has no such repository"),
        (
            {"repo": "org/private"},
            r"or a private one: check the name, or log in by `hf auth login`, set HF_TOKEN, or pass token=",
        ),
        ({"repo": "org/gated"}, r"'org/gated' is gated: ask for access on its page on the hub, then log in"),
        ({"token": "hf_wrong"}, r"the hub refuses 'org/probes' \(401: .+\): log in"),
        ({"revision": "v9"}, r"'org/probes' has no revision 'v9': give a branch, a tag, or the whole hash of a commit"),
        ({"revision": "0" * 40}, r"'org/probes' has no revision '0{40}'"),
        (
            {"repo": "no/such/folder"},
            r"no such folder: 'no/such/folder'; give a folder, or a name on the hub",
        ),
        ({"repo": "x" * 5000}, r"no such folder: 'x{300}'; give a folder"),
        ({"repo": "org/\0"}, r"is neither a folder nor a name on the hub"),
        ({"repo": "org/model"}, r"'org/model' holds no manifest.json: it is not a probe pack"),
        ({"endpoint": "http://127.0.0.1:9"}, r"not whole in the cache, and the hub cannot be reached"),
        ({"endpoint": "no address"}, r"'org/probes' .+: check the connection"),
    ],
)
def test_hub_errors_come_with_a_remedy(hub, fetch, saved, how, message):
    hub.put(REPO, saved)
    hub.create("org/private", private=True)
    hub.create("org/gated", gated=True)
    hub.put("org/gated", saved)
    hub.put("org/model", {"config.json": b"{}"})
    with pytest.raises(PackError, match=message) as caught:
        fetch(**how)
    assert "\n" not in str(caught.value)


def test_push_without_rights_is_reported(hub, pack):
    for token in (None, "hf_wrong"):
        with pytest.raises(PackError, match=r"log in by `hf auth login`, set HF_TOKEN, or pass token="):
            pack.push_to_hub(REPO, token=token, endpoint=hub.url)
    assert hub.repositories == {}
    with pytest.raises(PackError, match=r"neither a folder nor a name on the hub"):
        pack.push_to_hub("a/b/c", token=hub.token, endpoint=hub.url)


def test_revision_of_a_folder_is_refused(pack):
    with pytest.raises(ConfigError, match=r"is a folder here, and a folder has no revision 'v1'"):
        ProbePack.from_pretrained(str(pack.directory), revision="v1")


# -- the command ---------------------------------------------------------------------------------


def test_push_command_prints_what_to_pin(hub, fetch, pack, monkeypatch, capsys):
    def run(*arguments, token=hub.token):
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(constants, "ENDPOINT", hub.url)  # HF_ENDPOINT is read when huggingface_hub is imported
            patched.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
            patched.setenv("HF_TOKEN", token)
            patched.setattr(sys, "argv", ["probemon", "pack", "push", str(pack.directory), *arguments])
            main()
        return ended.value.code, capsys.readouterr()

    code, printed = run(REPO, "--json", "--private", "--message", "first")
    told = json.loads(printed.out)
    assert code == 0 and hub.repositories[REPO].private
    assert same(fetch(revision=told["commit"], manifest_sha256=told["manifest_sha256"], token=hub.token), pack)
    code, printed = run(REPO, "--revision", "trial")
    assert code == 0 and told["manifest_sha256"] in printed.out and hub.repositories[REPO].refs["trial"] in printed.out
    assert re.search(rf"pushed random to {hub.url}/{REPO}/commit/", printed.out)
    code, printed = run(REPO, token="hf_wrong")
    assert code == 2 and printed.err.startswith("probemon: the hub refuses") and printed.err.count("\n") == 1
