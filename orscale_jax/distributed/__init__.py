"""Polar factors of many arrays of matrices, on a mesh.

Arrays of matrices ``(*batch, m, n)`` in, polar factors out; nothing here knows which
parameters they are. The stage of ``transforms/orthogonalize.py`` calls ``exchange``.

===========  =========================================================================
placement    where arrays are: their shardings, and the axes that cross slow links
exchange     the entry: the execution of a plan inside ``jax.shard_map``
collectives  the collectives of that
plan         the plan of a mesh; imports no JAX, like the next two
costs        what its buckets hold and cost
mesh         the shape of a mesh, by factors of its axes
===========  =========================================================================

Imports ``newton_schulz`` and ``sharding``.
"""
