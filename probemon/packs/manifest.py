"""Reads and checks the manifest.

manifest = read_manifest(directory / "manifest.json")      # PackError, PackVersionError, PackCorrupt
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from probemon.core.probes import NORMS
from probemon.core.score_rules import SCORE_RULES
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError, PackCorrupt, PackError, PackVersionError
from probemon.packs.claims import check_claims
from probemon.util.strict_json import loads

MANIFEST, CONCEPTS, PROBES, CARD = "manifest.json", "concepts.jsonl", "probes.safetensors", "README.md"
FORMAT = "probemon-pack"
# 2 added softmax groups, which readers of 1 would score wrongly.
FORMAT_VERSION, GROUPED_VERSION = FORMAT_VERSIONS = (1, 2)
# A score means: the concept is at this token, or at this or an earlier one.
HERE, SO_FAR = SCOPES = ("here", "so far")
# Characters on which a terminal acts, and lone surrogates, which cannot be written.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# JSON may take sixty times its size; concepts are parsed by line.
MAX_MANIFEST_BYTES, MAX_CONCEPTS_BYTES = 64 << 20, 256 << 20
_STATES = "ssm_state."


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the checked manifest. Raises `PackError`, `PackVersionError`, `PackCorrupt`."""
    return parse_manifest(read_bounded(path, MAX_MANIFEST_BYTES), path)


def parse_manifest(data: bytes, path: Path) -> dict[str, Any]:
    """Return the checked manifest of `data`."""
    try:
        manifest = loads(data.decode())
    except (RecursionError, ValueError) as error:  # encoding, endless brackets, numbers of thousands of digits
        raise PackCorrupt(f"{path} is not valid JSON ({error}): fetch the pack again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        actual_format = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise PackError(f"{path}: format is {actual_format!r:.80}, expected {FORMAT!r}: this is not a probe pack")
    version = manifest.get("format_version")
    if type(version) is not int or version not in FORMAT_VERSIONS:  # 1.0 and true equal 1
        raise PackVersionError(
            f"{path}: format_version is {version!r:.80}, this probemon reads {' and '.join(map(str, FORMAT_VERSIONS))}:"
            " upgrade probemon or fetch the pack in one of these"
        )
    _check_kinds(manifest, path)
    try:
        check_claims(manifest)
    except ValueError as error:
        raise PackCorrupt(f"{path}: {error}: fetch the pack again, or fix its manifest") from None
    for spec in manifest["inputs"]:
        if not isinstance(spec, dict) or set(spec) - {"site", "norm", "eps"} or spec.get("norm", "none") not in NORMS:
            raise PackError(f"{path}: input {spec!r:.200}: expected site, norm ({', '.join(NORMS)}) and eps")
    _check_files(manifest["files"], path)
    return manifest


def _check_kinds(manifest: dict[str, Any], path: Path) -> None:
    kinds = {"name": str, "licence": str, "host": dict, "inputs": list, "score_rule": str, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(manifest.get(key), kind):
            raise PackCorrupt(f"{path}: {key!r} is missing or not a {kind.__name__}: fetch the pack again")
    if CONTROL.search(manifest["name"]):
        raise PackCorrupt(
            f"{path}: the name is {ascii(manifest['name'])[:100]}, and a terminal would act on its control characters:"
            " name the pack otherwise"
        )
    if manifest["score_rule"] not in SCORE_RULES:
        raise PackError(
            f"{path}: score_rule is {manifest['score_rule']!r:.80}, expected one of {', '.join(SCORE_RULES)}"
        )
    if manifest.get("scope", HERE) not in SCOPES:
        raise PackError(f"{path}: scope is {manifest['scope']!r:.80}, expected one of {', '.join(SCOPES)}")
    for key in ("recommended", "quality", "provenance"):
        if not isinstance(manifest.get(key) or {}, dict):
            raise PackCorrupt(f"{path}: {key!r} is not an object: fetch the pack again")


def check_scope(scope: str, sites: Iterable[str], where: str, error: type[PackError]) -> None:
    """Raise `error` if probes of a recurrent state claim to score one token alone."""
    state = next((site for site in sites if site.startswith(_STATES)), None)
    if state is not None and scope != SO_FAR:
        raise error(
            f"{where}: scope is {scope!r}, and its probes read {state}, which holds all tokens so far: they are trained"
            f" on whether a concept was there so far, and scope is {SO_FAR!r}"
        )


def scope_of(sites: Iterable[str]) -> str:
    """Return the default scope for these sites."""
    return SO_FAR if any(site.startswith(_STATES) for site in sites) else HERE


def _check_files(files: dict[str, Any], path: Path) -> None:
    for file, entry in files.items():
        if Path(file).name != file:
            raise PackCorrupt(f"{path}: file {file!r:.200} is outside the pack")
        size = entry.get("size") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or type(size) is not int:
            raise PackCorrupt(f"{path}: {file!r:.200} has no sha256 and size: fetch the pack again")
        if not 0 <= size < 1 << 63:
            raise PackCorrupt(
                f"{path}: {file!r:.200} has size {str(size)[:40]}, and no file has that: fetch the pack again"
            )


def check_recommended(recommended: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` (`UnknownSetting` for a typo) if recommended settings are invalid."""
    try:
        CascadeConfig.of(recommended)
        for name in recommended:
            if name in ("include", "exclude", "depth"):
                raise ConfigError(f"a pack cannot recommend {name}: set it when you watch")
    except (ConfigError, ArithmeticError, TypeError) as error:
        kind = type(error) if isinstance(error, ConfigError) else ConfigError
        raise kind(f"{where}: the pack's recommended settings are not valid: {str(error)[:300]}") from error


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes. Raises `PackCorrupt` for more than `max_bytes`."""
    size = path.stat().st_size
    if size > max_bytes:
        raise PackCorrupt(f"{path} has {size:,} bytes, at most {max_bytes:,} are read: fetch the pack again")
    return path.read_bytes()
