"""The stages of OrScale, one a file, and wrappers around them.

==============  ======================================================================
orthogonalize   M̃ to Q
shape           Q to sQ
decay           adds λW, with schedules that count
first_update    waits for a matrix's first update
trust_ratio     multiplies by the clipped, calibrated ratio
per_matrix      maps over matrices, and arrays with one entry per matrix
float32         runs a transformation in float32
fusion_barrier  keeps a GPU from fusing a transformation with the next
qk_clip         rescales queries and keys; ``attention`` finds them
==============  ======================================================================

Imports ``parameters``, ``distributed``, ``newton_schulz``, ``trees`` and ``_checks``.
"""
