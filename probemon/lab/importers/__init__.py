"""Imports other projects' probes into packs, one module a source.

    from probemon.lab.importers import hatcat
    pack, report = hatcat.import_pack("lens_packs/mine", "packs/mine", site="resid_post.15", normalize="layernorm")
    print(report)                                   # what was found, what was left out, what nobody recorded

`hatcat`: folders of one state dict a concept, thousands of them, with their hierarchy. `sklearn`: estimators in memory.
`probelab`, `probekit`, `steerkit`, `saelens`, `hallucination`: their files. `generic`: weights and biases by name, in
memory or in safetensors. `weights` reads files that others wrote and runs nothing that is in them; `report` says what
an import met.
"""
