"""Newton–Schulz: the polar factor of a matrix, in any precision, on one device.

Only numerics: matrices ``(..., m, n)`` in, polar factors out. Nothing here knows about
parameters, optimizers or meshes; where several devices share a matrix, the caller passes
what sums over them.

============  ========================================================================
polar         the public ``polar_factor``, the settings and forms of the iteration
coefficients  presets, tables of coefficients, and the construction of optimal ones
arithmetic    rounding, products, normalization and AOL
restarts      where the Gram form restarts, and when it is cheaper (NumPy)
============  ========================================================================

Imports nothing of the package but ``_checks``.
"""
