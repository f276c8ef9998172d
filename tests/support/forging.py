"""Packs whose hashes are right and whose contents were changed."""

import json

from safetensors.torch import load_file, save_file

from probemon.util.files import sha256


def forge(pack, target, change):
    """A copy of a pack with some tensors changed and sizes and hashes made right again."""
    target.mkdir()
    manifest = json.loads((pack.directory / "manifest.json").read_text())
    tensors = load_file(pack.directory / "probes.safetensors")
    change(tensors)
    for file in ("concepts.jsonl", "README.md"):
        (target / file).write_bytes((pack.directory / file).read_bytes())
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "probes.safetensors")
    for file in manifest["files"]:
        manifest["files"][file] = {"sha256": sha256(target / file), "size": (target / file).stat().st_size}
    (target / "manifest.json").write_text(json.dumps(manifest))
    return target
