"""Forms of a generated update: functions of a site's input and output, set by a code.

    form = HeadGroups(site.n_in, site.n_out, groups=9, rank=4, generator=generator)   # or RankMask, Kronecker, Film
    output = form(x, codes, base)           # x [M, in], codes [M, n], base [M, out]

The last factor starts at zero, so a fresh adapter leaves the model bit-identical.
"""
