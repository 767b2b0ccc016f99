"""Polar factors of many arrays of matrices, on a mesh.

The entry is ``engine``: it plans, and executes the plan. Arrays of matrices
``(*batch, m, n)`` in, polar factors out; nothing here knows which parameters they are.

===========  =========================================================================
engine       the entry, with a branch for each platform; on one device, too
assumed      what types do not say, and a program has to assume
slow_links   which axes of a mesh cross slow links, from devices or from the user
exchange     the execution of a plan inside ``jax.shard_map``
collectives  the collectives of that
plan         the plan of a mesh; imports no JAX, like the next two
costs        what its buckets hold and cost
mesh         the shape of a mesh, by factors of its axes
===========  =========================================================================

Imports ``newton_schulz`` and ``sharding``.
"""
