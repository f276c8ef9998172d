"""From WordNet and a host model to a trained probe pack: the parts of `scripts/build_wordnet_pack.py`."""
