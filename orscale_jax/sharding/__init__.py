"""How arrays are sharded: by their types, by an argument, or by annotations.

===============  ======================================================================
meshes           which mesh arrays are on
typed_sharding   shardings that are part of arrays' types
param_shardings  shardings from an argument or from annotations
state_shardings  the public ``state_shardings``
===============  ======================================================================

Imports ``trees`` and ``_checks``.
"""
