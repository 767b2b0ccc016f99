"""How arrays are sharded: by their types, by an argument, or by annotations.

===============  ======================================================================
typed_sharding   shardings that are part of arrays' types, and the mesh of arrays
param_shardings  shardings from an argument or from annotations
state_shardings  the public ``state_shardings``
===============  ======================================================================

Imports ``trees`` and ``validate``.
"""
