"""Analyse random texts with the tiny host into the folder of the first argument, going on with what is there: run by
tests, and killed.
"""

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "support")]
# ruff: noqa: E402

import probemon.lab.corpora.windows
from conftest import make_model, make_pack
from corpora import make_tokenizer, random_texts
from probemon import DynamicProbeManager

probemon.lab.corpora.windows.SHARD_DOCUMENTS = 20
model = make_model()
with tempfile.TemporaryDirectory() as folder:
    pack = make_pack(Path(folder) / "pack", model)
    manager = DynamicProbeManager(pack, impl="cpu", strategy="descent", keep_top_k=5)
    manager.analyze(model, make_tokenizer(), random_texts(600), sys.argv[1], resume=True, floor=0.3)
