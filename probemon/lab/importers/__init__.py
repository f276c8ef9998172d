"""Imports other projects' probes into packs, one module per source.

    pack, report = hatcat.import_pack("lens_packs/mine", "packs/mine", site="resid_post.15", normalize="layernorm")

`hatcat`: folders with one state dict per concept. `sklearn`: estimators in memory. `probelab`, `probekit`, `steerkit`,
`saelens`, `hallucination`, `lie_detectors`, `repeng`: their files. `generic`: weights and biases by name.
"""
