"""Newton–Schulz of many arrays, on one device or on a mesh.

The entry is ``engine``: it plans, and executes the plan. Arrays of matrices
``(*batch, m, n)`` in, polar factors out; nothing here knows which parameters they are.

==========  ==========================================================================
engine      the entry, with a branch for each platform
plan        the plan of a mesh, and what it costs; imports no JAX
exchange    its execution inside ``jax.shard_map``, and the collectives
assumed     the shardings of arrays on Auto axes, where nobody says them
slow_links  which axes of a mesh cross slow links, from devices or from the user
==========  ==========================================================================

Imports ``newton_schulz`` and ``sharding``.
"""
