"""Newton–Schulz: the polar factors of matrices, in any precision, on one device.

Matrices ``(..., m, n)`` in, polar factors out. Nothing here knows about parameters,
optimizers or meshes; where several devices share a matrix, the caller passes what sums
over them.

============  ========================================================================
polar         the public ``polar_factor``, of one array
stacks        many arrays on one device: stacks and chunks
platforms     what each platform does with matrices, a row for each
hardware      the rates of chips, by which the plans of a mesh are compared
iteration     the settings and forms of the iteration
monic         the form in float16, whose products a GPU adds up as it computes them
coefficients  presets, tables of coefficients, and the construction of optimal ones
arithmetic    rounding, products, normalization and AOL
restarts      where the Gram form restarts, and when it is cheaper (NumPy)
fusion        small results of many arrays in few GPU kernels; layouts
============  ========================================================================

Imports ``sharding`` and ``validate``.
"""
