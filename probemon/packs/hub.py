"""Packs on the Hugging Face hub: fetched with every byte checked, saved with hub metadata, pushed in one commit.

    pack = ProbePack.from_pretrained("org/name", revision=commit, manifest_sha256=digest)
    pack.save_pretrained("mine/")
    pushed = pack.push_to_hub("org/name")
    pushed.commit, pushed.manifest_sha256                                          # for others to pin

The manifest has size and sha256 of all other files, so `manifest_sha256` pins every byte. A `revision` trusts the hub:
git trees and signatures are not checked. To sign a pack, sign its manifest.

Downloads are hashed once, pinned ones each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from probemon.errors import ConfigError, PackChanged, PackCorrupt, PackError, ProbemonError
from probemon.packs import files as packfile
from probemon.packs.files import check_target
from probemon.packs.local import hint
from probemon.packs.manifest import CARD, CONCEPTS, MANIFEST, PROBES, read_manifest
from probemon.packs.opened import OpenedPack
from probemon.util.cache_folders import check_hub_cache, hub_cache_problem
from probemon.util.files import sha256, write_text_atomically
from probemon.util.first_sentence import first_sentence

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Pack = TypeVar("Pack", bound=OpenedPack)
_LIBRARY = "probemon"
_TAGS = ("probemon", "concept-probes", "interpretability")
# next to the cache's snapshots: one file per commit, with the sha256 of its accepted manifest
_ACCEPTED = ".probemon"
# The hub's licence ids (https://huggingface.co/docs/hub/repositories-licenses) that packs are likely to have; it
# refuses others.
_LICENCES = {
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc-by-3.0",
    "cc-by-4.0", "cc-by-nc-4.0",
    "cc-by-nc-nd-4.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0", "cc0-1.0",
    "cdla-permissive-2.0", "epl-2.0", "eupl-1.2",
    "gpl-2.0", "gpl-3.0", "isc", "lgpl-2.1", "lgpl-3.0", "mit", "mpl-2.0", "odbl", "odc-by", "pddl", "unlicense",
    "zlib",
}  # fmt: skip


@dataclass(frozen=True)
class Pushed:
    """The outcome of a push, with the url of the `pull_request`, if any."""

    url: str
    commit: str
    manifest_sha256: str
    pull_request: str | None


def find(
    repo: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    manifest_sha256: str | None = None,
    endpoint: str | None = None,
) -> Path:
    """Return a pack's folder: `repo` itself, or a checked snapshot in the cache."""
    if manifest_sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", manifest_sha256):
        raise ConfigError(f"manifest_sha256 is {manifest_sha256!r}: give all 64 hex digits of the sha256 of {MANIFEST}")
    if not os.path.isdir(repo):
        if cache_dir is None:
            check_hub_cache()
        return _fetch(
            repo,
            revision,
            manifest_sha256,
            {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only, "endpoint": endpoint},
        )
    if revision is not None:
        raise ConfigError(
            f"{repo!r} is a folder here, and a folder has no revision {revision!r}: leave revision out, or work from"
            f" another folder to have the hub's {repo!r}"
        )
    return Path(repo)


def _check_set(pack: OpenedPack) -> None:
    """Raise `ConfigError` if what is in force is not what the files have."""
    if pack.rewritten:
        raise ConfigError(
            f"thresholds or weights of {pack.name} were written to since it was opened, and its files, which are"
            " copied, have those from before: write a pack with the new ones with probemon.packs.edit.rename"
        )
    recommended = pack.manifest.get("alert_set")
    if pack.alert_set != recommended:
        raise ConfigError(
            f"the alert set {pack.alert_set!r} is in force, and the files of {pack.name} recommend {recommended!r}:"
            f" save .with_alert_set({recommended!r}), or write a pack that recommends the other with"
            " probemon.packs.edit.rename"
        )


def save(pack: Pack, folder: str | Path, *, overwrite: bool = False) -> Pack:
    """Copy a pack: see `ProbePack.save_pretrained`."""
    target = check_target(folder, overwrite)
    _check_set(pack)
    manifest, card = _for_hub(pack)
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        for file in (CONCEPTS, PROBES):
            shutil.copyfile(pack.directory / file, staging / file)
            _check_copied(pack, file, sha256(staging / file))
        (staging / CARD).write_bytes(card)
        (staging / MANIFEST).write_bytes(manifest)
        staging.chmod(0o755)  # mkdtemp makes it private
        copy = type(pack).open(staging)
        packfile.replace_directory(staging, target)
    except OSError as error:
        raise PackError(
            f"{pack.directory} cannot be copied to {target} ({error.strerror}: {error.filename}): make room, or choose"
            " another path"
        ) from error
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
    copy.set_directory(target)
    return copy


def push(
    pack: OpenedPack,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    token: str | bool | None = None,
    endpoint: str | None = None,
) -> Pushed:
    """Push a pack: see `ProbePack.push_to_hub`."""
    from huggingface_hub import CommitOperationAdd

    _check_set(pack)
    manifest, card = _for_hub(pack)
    contents: dict[str, bytes | str] = {
        MANIFEST: manifest,
        CARD: card,
        CONCEPTS: str(pack.directory / CONCEPTS),
        PROBES: str(pack.directory / PROBES),
    }
    with _hub_errors(repo_id, revision):
        api = _api(token, endpoint)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        added = [CommitOperationAdd(name, content) for name, content in contents.items()]
        for file in added:
            if file.path_in_repo in (CONCEPTS, PROBES):  # hashes of what is sent
                _check_copied(pack, file.path_in_repo, file.upload_info.sha256.hex())
        commit = api.create_commit(
            repo,
            added,
            commit_message=commit_message or f"Push {pack.name} with probemon",
            revision=revision,
            create_pr=create_pr,
        )
    return Pushed(commit.commit_url, commit.oid, _sha256(manifest), commit.pr_url)


def _fetch(repo: str, revision: str | None, pin: str | None, how: dict[str, Any]) -> Path:
    """Fetch manifest and files of one commit; return the folder. Wrong files leave the cache."""
    folder = _snapshot(repo, revision, [MANIFEST], how)
    if not (folder / MANIFEST).is_file():
        raise PackError(
            f"{repo!r} holds no {MANIFEST}{'' if revision is None else f' at {revision!r}'}: it is not a probe pack"
        )
    digest = sha256(folder / MANIFEST)
    accepted = _accepted(folder).is_file() and _accepted(folder).read_bytes() == digest.encode()
    suspect = MANIFEST
    try:
        if pin is not None:
            packfile.check_pin(folder / MANIFEST, digest, pin)
        files = _listed(folder)
        others = sorted(set(files) - {CONCEPTS, PROBES, CARD})
        if others:
            raise PackCorrupt(
                f"{repo!r}: {MANIFEST} lists {others[0]!r}, which is not a file of a pack: ask its publisher"
            )
        missing = [file for file in files if not (folder / file).is_file()]
        if missing:
            if not how["local_files_only"]:
                _check_offered(repo, folder.name, {file: files[file]["size"] for file in missing}, how)
            _snapshot(repo, folder.name, missing, how)
        if missing or pin is not None or not accepted:
            for suspect, entry in files.items():
                _check_file(folder / suspect, entry)
    except PackError:
        # An accepted manifest is right: the pin may be wrong.
        for file in {suspect} - {MANIFEST} if accepted else {suspect, MANIFEST}:
            _forget(folder / file)
        raise
    if not accepted:
        with suppress(OSError):  # else hashed each time
            write_text_atomically(_accepted(folder), digest)
    return folder


def _snapshot(repo: str, revision: str | None, files: list[str], how: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    with _hub_errors(repo, revision):
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=files,
                library_name=_LIBRARY,
                library_version=version(_LIBRARY),
                **how,
            )
        )


def _check_offered(repo: str, commit: str, sizes: dict[str, int], how: dict[str, Any]) -> None:
    """Raise `PackCorrupt` unless the hub has these files in these sizes."""
    with _hub_errors(repo, commit):
        paths = _api(how["token"], how["endpoint"]).get_paths_info(repo, list(sizes), revision=commit)
    hub_sizes = {path.path: getattr(path, "size", None) for path in paths}  # folders have no size
    for file, size in sizes.items():
        if hub_sizes.get(file) != size:
            has = f"{hub_sizes[file]} bytes of {file}" if file in hub_sizes else f"no {file}"
            raise PackCorrupt(
                f"{repo!r} at {commit[:12]} has {has}, its manifest says {size}: nothing of it was fetched; ask its"
                " publisher"
            )


def _listed(folder: Path) -> dict[str, Any]:
    """Return a manifest's files."""
    try:
        listed: dict[str, Any] = read_manifest(folder / MANIFEST)["files"]
    except ProbemonError:
        raise
    except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise PackCorrupt(
            f"{folder / MANIFEST} is malformed ({type(error).__name__}: {first_sentence(error)}): fetch the pack again"
        ) from error
    return listed


def _check_file(path: Path, entry: dict[str, Any]) -> None:
    packfile.check_size(path, entry["size"])
    packfile.check_hash(path, entry["sha256"])


def _check_copied(pack: OpenedPack, file: str, digest: str) -> None:
    """Raise `PackChanged` if a file is not the one that was opened."""
    if digest != pack.manifest["files"][file]["sha256"]:
        raise PackChanged(f"{pack.directory / file} has changed since the pack was opened: open the pack again")


def _accepted(folder: Path) -> Path:
    return folder.parents[1] / _ACCEPTED / folder.name


def _forget(path: Path) -> None:
    """Remove a file and its blob from the cache."""
    with suppress(OSError):
        blob = path.parent / path.readlink() if path.is_symlink() else path
        path.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _for_hub(pack: OpenedPack) -> tuple[bytes, bytes]:
    """Return manifest and card as bytes. Raises `PackCorrupt` for a damaged pack."""
    card = _card(pack)
    files = {file: pack.manifest["files"][file] for file in (CONCEPTS, PROBES)}
    for file, entry in files.items():
        _check_file(pack.directory / file, entry)
    manifest = {**pack.manifest, "files": {**files, CARD: {"sha256": _sha256(card), "size": len(card)}}}
    try:
        return (json.dumps(manifest, ensure_ascii=False, indent=1) + "\n").encode(), card
    except ValueError as error:
        raise PackError(
            f"{pack.directory / MANIFEST} holds text that UTF-8 cannot encode ({first_sentence(error)}): write the pack"
            " again without it"
        ) from error


def _card(pack: OpenedPack) -> bytes:
    """Return the card with metadata; raise `PackError` for invalid YAML."""
    import yaml  # a dependency of huggingface_hub
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK
    from huggingface_hub.utils import validate_repo_id

    path = pack.directory / CARD
    try:
        text = f"# {pack.name}\n" if pack.card is None else pack.card.decode()
        block = REGEX_YAML_BLOCK.search(text)
        if block is not None and any(isinstance(token, yaml.AliasToken) for token in yaml.scan(block.group(2))):
            raise ValueError("its metadata refers to itself, which can expand without end")
        card = ModelCard(text if text.lstrip().startswith("---") else f"---\n\n---\n\n{text}")
        data: Any = card.data
        data.library_name = data.library_name or _LIBRARY
        data.tags = list(dict.fromkeys([*(data.tags or ()), *_TAGS]))
        licence = pack.manifest["licence"].strip()
        if data.license is None and licence.lower() in _LICENCES:
            data.license = licence.lower()
        elif data.license is None and licence:
            data.license, data.license_name = (
                "other",
                re.sub("[^a-z0-9.]+", "-", licence.lower()).strip("-.")[:64].rstrip("-.") or "other",
            )
        model_id = pack.manifest["host"].get("model_id")
        if data.base_model is None and isinstance(model_id, str) and "/" in model_id:
            with suppress(ValueError):  # not a hub name
                validate_repo_id(model_id)
                data.base_model = model_id
        return str(card).encode()
    except Exception as error:  # any YAML error
        raise PackError(
            f"{path} cannot be given metadata ({first_sentence(error)}): begin it with a heading, or with metadata in"
            " YAML between two lines of ---"
        ) from error


def _api(token: str | bool | None, endpoint: str | None) -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(endpoint=endpoint, token=token, library_name=_LIBRARY, library_version=version(_LIBRARY))


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub or the network into a `PackError`."""
    try:
        yield
    except ProbemonError:
        raise
    except Exception as error:
        raise PackError(_explanation(repo, revision, error) + hint(repo)) from error


def _explanation(repo: str, revision: str | None, error: Exception) -> str:
    """Return what went wrong and what to do."""
    from huggingface_hub import constants, errors

    if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # an upload thread's error names the file, its cause the reason
    log_in = "log in by `hf auth login`, set HF_TOKEN, or pass token="
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return f"{repo!r} is neither a folder nor a name on the hub such as 'org/name' ({first_sentence(error)})"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo!r} is gated: ask for access on its page on the hub, then {log_in}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo!r} is not a folder, and the hub has no such repository, or a private one: check the name, or"
            f" {log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo!r} has no revision {revision!r}: give a branch, a tag, or the whole hash of a commit"
    if status in (401, 403):
        return (
            f"the hub refuses {repo!r} ({status}: {first_sentence(error)}): {log_in}, with the rights that this needs"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{repo!r} needs the hub, and HF_HUB_OFFLINE is set: unset it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        if error.__cause__ is None or isinstance(error.__cause__, errors.OfflineModeIsEnabled):
            what = "" if revision is None else f" at {revision!r}"
            offline = constants.is_offline_mode()
            return (
                f"{repo!r}{what} is not a folder, and not whole in the cache, and the hub may not be asked:"
                f" {'unset HF_HUB_OFFLINE' if offline else 'leave out local_files_only'} once, or give a folder"
            )
        return (
            f"{repo!r} is not a folder, and not whole in the cache, and the hub cannot be reached"
            f" ({first_sentence(error.__cause__)}): check the connection, and HF_ENDPOINT if it is set"
        )
    if problem := hub_cache_problem(error):
        return f"{repo!r} cannot be fetched: {problem}"
    return (
        f"the hub failed for {repo!r} ({type(error).__name__}: {first_sentence(error)}): check the"
        " connection, and try again"
    )
