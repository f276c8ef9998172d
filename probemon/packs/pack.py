"""A probe pack: a directory of concept probes and everything needed to use them honestly.

    pack = ProbePack.open("packs/mine")        # milliseconds; weights are not read until used
    pack = ProbePack.from_pretrained("org/name", verify=True)   # and hashes, weights and golden scores checked
    pack = ProbePack.write("mine/", name="mine", ...)
    pack.concepts[3]["name"], pack.path(17), pack.find("whale")

The format is described in docs/pack_format.md. Nothing in it is executable; nothing is unpickled.
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
    """A probe pack. Read-only; make one with `open`, `from_pretrained` or `write`, and ask it as `OpenedPack` says."""

    @classmethod
    def of(cls, opened: OpenedPack) -> ProbePack:
        """The same pack, whose files stay open: what a `PackWriter` wrote, as a `ProbePack`."""
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
        """Open a local directory, a pack that comes with probemon by its name (or "demo"), or `org/name` of the hub.

        `revision` (branch, tag or commit), `token`, `cache_dir`, `local_files_only` and `endpoint` are
        huggingface_hub's, and so is the cache. Files that were fetched are hashed before their first use.
        `manifest_sha256`: what sha256 the pack's manifest must have; every byte is then checked, each time, in a
        directory too. Raises `PackError` saying what to do where there is no such pack, or no way to it, and
        `PackCorrupt` where a byte differs.
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
        # Of a folder, which anybody may write to meanwhile, the very files that are opened are hashed. Those of the
        # hub's cache were.
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
        """Write a pack and open it. Probes are given in any order and numbered here.

        `weights`: stacked tensors by parameter. The dtype of `w1` is the pack's; biases (and the scales of int8
        weights: `probemon.packs.quantize`) are kept in fp32. The other options are those of `PackWriter`; what is
        `[P]`, weights too, is in the order of `concepts`. The directory appears whole or not at all; an existing one is
        an error unless `overwrite`.
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
        """Copy the pack to a directory, its card begun by metadata that the hub reads, and open the copy.

        What the card has of metadata stays; `library_name`, `tags`, `license` and, where the host has a name on the
        hub, `base_model` are added, and the manifest states the new card. The directory appears whole or not at all.
        Raises `PackError`, and `PackCorrupt` where this pack is damaged.
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
        """Push what `save_pretrained` would write to a repository on the hub, made where there is none, in one commit.

        The arguments are huggingface_hub's; `revision` is a branch, made where there is none. The result has the
        `commit` and the `manifest_sha256` that others pin. Raises `PackError` saying what to do, and `PackCorrupt`
        where this pack is damaged: nothing is sent then.
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
    """Return `pack`. Raise `PackError` for what is no pack, such as its path."""
    if not isinstance(pack, ProbePack):
        raise PackError(
            f"{pack!r} is a {type(pack).__name__}: open it first, ProbePack.open(path) or"
            " ProbePack.from_pretrained(name)"
        )
    return pack
