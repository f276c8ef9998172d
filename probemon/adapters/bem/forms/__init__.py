"""Forms of a generated update: what a code makes of a site's input and output.

    form = HeadGroups(site.n_in, site.n_out, groups=9, rank=4, generator=generator)   # or RankMask, Kronecker, Film
    output = form(x, codes, base)           # x [M, in], codes [M, n], base [M, out]: base plus the update
    form.dense(code)                        # [out, in]: the update of one code as a matrix; None where it is none
    sigma1, frobenius = form.sizes(codes)   # [M] each
    form.n_params, form.flops(1)            # trainable numbers, multiply-adds of one token counted as two

Every form starts with its last factor at zero, so that a fresh adapter leaves its host as it is, bit for bit, and the
other factor has a gradient as soon as the last one has moved.
"""
