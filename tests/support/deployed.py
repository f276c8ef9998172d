"""A deployment of two rules on the tiny host: its folder with a pack, its text, and a file of it."""

import hashlib

import torch

from conftest import PAD, make_model, make_pack
from probemon.host.fingerprint import fingerprint
from probemon.host.identity import manifest_host

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


def with_pack(folder):
    """The folder, with the pack of the deployment in it."""
    make_pack(
        folder / "pack", make_model(), alert_set="usual", alert_sets={"rate_0.01": torch.full((40,), 0.25)},
        host=manifest_host(make_model(), "tiny"),
    )  # fmt: skip
    return folder


def text_of(folder):
    sha256 = hashlib.sha256((folder / "pack/manifest.json").read_bytes()).hexdigest()
    return f"""\
deployment: 1
name: two rules
host:
  model: tiny
  fingerprint: {fingerprint(make_model())}
packs:
  - pack: pack
    manifest_sha256: {sha256}
cascade:
  keep_top_k: 5
always_on: [c11]
audit_rate: 1
rules:
  - concepts: [c9]
    above: 0.2
    action: record
    on_blind: pass
  - concepts: ["c1*", c3]
    rate: 0.01
    aggregate: null
    for_tokens: 2
    action: stop
    on_blind: raise
""".replace("    aggregate: null\n", "")


def written(folder, text, name="watch.yaml"):
    path = folder / name
    path.write_text(text)
    return path
