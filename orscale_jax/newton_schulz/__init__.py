"""Newton–Schulz: the polar factors of matrices, in any precision, on one device.

Matrices ``(..., m, n)`` in, polar factors out. Nothing here knows about parameters,
optimizers or meshes; where several devices share a matrix, the caller passes what sums
over them.

============  ========================================================================
polar         the public ``polar_factor``, of one array
stacks        many arrays on one device: stacks and chunks
iteration     the forms of the iteration
platforms     the settings, and what each platform does with matrices, a row for each
hardware      the rates of chips, by which the plans of a mesh are compared
coefficients  presets, tables of coefficients, and the construction of optimal ones
arithmetic    rounding, products, normalization and AOL
restarts      where the Gram form restarts, what it costs, how large it gets (NumPy)
fusion        small results of many arrays in few GPU kernels; layouts
============  ========================================================================

Imports ``sharding`` and ``validate``.
"""
