"""A probe pack: a directory of concept probes with thresholds and metadata.

    pack = ProbePack.open("packs/mine")        # weights are read on use
    pack = ProbePack.from_pretrained("org/name", verify=True)   # checks hashes, weights and golden scores
    pack = ProbePack.write("mine/", name="mine", ...)
    pack.concepts[3]["name"], pack.path(17), pack.find("whale")

Format: docs/formats.md. Nothing is executable or pickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from probemon.core.familiarity import Familiar
from probemon.core.probes import Architecture
from probemon.errors import PackError
from probemon.packs import hub
from probemon.packs.files import check_target
from probemon.packs.local import find_folder
from probemon.packs.opened import OpenedPack
from probemon.packs.pack_html import packs_html
from probemon.packs.writer import PackWriter
from probemon.util.checks import check_mapping, check_mappings, check_tensor


class ProbePack(OpenedPack):
    """A read-only pack; see `OpenedPack` for its methods."""

    @classmethod
    def of(cls, opened: OpenedPack) -> ProbePack:
        """Return an opened pack as a `ProbePack`, sharing its files."""
        pack = cls.__new__(cls)
        vars(pack).update(vars(opened))
        return pack

    def _repr_html_(self) -> str:
        return packs_html(f"{type(self).__name__} {self.name}", {self.name: self})

    @classmethod
    def from_pretrained(
        cls,
        repo: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        manifest_sha256: str | None = None,
        verify: bool = False,
        endpoint: str | None = None,
    ) -> ProbePack:
        """Open a local directory, a bundled pack by name, or `org/name` of the hub.

        `revision`, `token`, `cache_dir`, `local_files_only`, `endpoint`: huggingface_hub's, as is the cache; fetched
        files are hashed
        `manifest_sha256`: pins the manifest, and so every byte, in directories too

        Raises `PackError` if there is no such pack or no way to it, `PackCorrupt` if a byte differs.
        """
        folder = find_folder(repo)
        local = hub.find(
            os.fspath(repo) if folder is None else str(folder),
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            manifest_sha256=manifest_sha256,
            endpoint=endpoint,
        )
        # A folder may change, so its opened files are hashed; cached files were hashed already.
        return cls._open(local, verify, hashed=manifest_sha256 is not None and folder is not None, pin=manifest_sha256)

    @classmethod
    def write(
        cls,
        path: str | Path,
        *,
        name: str,
        concepts: Sequence[Mapping[str, Any]],
        weights: Mapping[str, Tensor],
        score_rule: str,
        inputs: Sequence[Mapping[str, Any]],
        host: Mapping[str, Any],
        licence: str,
        card: str,
        input_index: Tensor | None = None,
        softmax_group: Tensor | None = None,
        alert_threshold: Tensor | None = None,
        expand_threshold: Tensor | None = None,
        aggregated: Mapping[str, Tensor] | None = None,
        alert_set: str | None = None,
        alert_sets: Mapping[str, Tensor] | None = None,
        score_counts: Mapping[str, Tensor] | None = None,
        familiar: Sequence[Familiar | None] | None = None,
        golden_hidden: Tensor | None = None,
        recommended: Mapping[str, Any] | None = None,
        provenance: Mapping[str, Any] | None = None,
        quality: Mapping[str, Any] | None = None,
        scope: str | None = None,
        overwrite: bool = False,
    ) -> ProbePack:
        """Write a pack, whole or not at all, and open it.

        `weights`: stacked tensors by parameter; `w1` sets the dtype, biases and int8 scales (`probemon.packs.quantize`)
        are fp32

        Other options: see `PackWriter`. `[P]` tensors are in the order of `concepts`.
        """
        check_target(path, overwrite)
        check_mappings("concepts", concepts, PackError)
        for key, tensor in check_mapping("weights", weights, PackError).items():
            check_tensor(f"weights[{key!r}]", tensor, error=PackError)
        architecture = Architecture.of(weights, "weights")
        for key, tensor in weights.items():
            if len(tensor) != len(concepts):
                raise PackError(f"weights[{key!r}] has {len(tensor)} rows for {len(concepts)} concepts")
        writer = PackWriter(
            path,
            name=name,
            concepts=concepts,
            architecture=architecture,
            dtype=weights["w1"].dtype,
            score_rule=score_rule,
            inputs=inputs,
            host=host,
            licence=licence,
            card=card,
            input_index=input_index,
            softmax_group=softmax_group,
            alert_threshold=alert_threshold,
            expand_threshold=expand_threshold,
            aggregated=aggregated,
            alert_set=alert_set,
            alert_sets=alert_sets,
            score_counts=score_counts,
            familiar=familiar,
            golden_hidden=golden_hidden,
            recommended=recommended,
            provenance=provenance,
            quality=quality,
            scope=scope,
            overwrite=overwrite,
        )
        with writer:
            writer.put_slice(0, weights)
        return cls.of(writer.opened)

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> ProbePack:
        """Copy the pack to a directory, with hub metadata in its card, and open the copy.

        Adds `library_name`, `tags`, `license` and, if known, `base_model`. Raises `PackError`, `PackCorrupt`.
        """
        return hub.save(self, folder, overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        create_pr: bool = False,
        token: str | bool | None = None,
        endpoint: str | None = None,
    ) -> hub.Pushed:
        """Push the copy of `save_pretrained` to the hub in one commit, creating repository and branch if needed.

        The arguments are huggingface_hub's. Returns the `commit`, and the `manifest_sha256` to pin. Raises `PackError`,
        `PackCorrupt`.
        """
        return hub.push(
            self,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message,
            create_pr=create_pr,
            token=token,
            endpoint=endpoint,
        )


def check_pack(pack: object) -> ProbePack:
    """Return `pack`. Raises `PackError` if it is not a pack."""
    if not isinstance(pack, ProbePack):
        raise PackError(
            f"{pack!r} is a {type(pack).__name__}: open it first, ProbePack.open(path) or"
            " ProbePack.from_pretrained(name)"
        )
    return pack
