"""Newton–Schulz: the polar factor of a matrix, in any precision, on one device.

Only numerics: matrices ``(..., m, n)`` in, polar factors out. Nothing here knows about
parameters, optimizers or meshes; where several devices share a matrix, the caller passes
the sums over them as :class:`~orscale_jax.newton_schulz.arithmetic.ColumnShards`.

===============  =====================================================================
polar            the public ``polar_factor``, the settings and forms of the iteration
coefficients     presets, tables of coefficients and their rows
polar_express    the construction of optimal coefficients
preconditioning  normalization and AOL
gram             the iteration on the Gram matrix
restarts         where the Gram form restarts, and when it is cheaper (NumPy)
arithmetic       rounding, products, and sums over column shards
===============  =====================================================================

Imports nothing of the package but ``_checks``.
"""
