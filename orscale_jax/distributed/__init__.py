"""Newton–Schulz of many arrays, on one device or on a mesh.

The entry is ``engine``: it plans, and executes the plan. Arrays of matrices
``(*batch, m, n)`` in, polar factors out; nothing here knows which parameters they are.

=================  ===================================================================
engine             the entry, with a branch for each platform
platforms/         what each platform does with matrices, one class for each
stacks             the plan of one device: which arrays share a stack
mesh_shape         the axes of a mesh, divided where they cross slow links
slow_links         which axes those are, from devices or from the user
hardware           the rates of chips and links, one table
costs              what a plan costs by these rates
buckets, planner   the plan of a mesh; like hardware and costs, they do not import JAX
exchange           its execution, inside ``jax.shard_map``
collectives        its collectives, over slow links before fast ones
chunks             Newton–Schulz of large stacks in bounded memory
shards             the program of one device, where shardings are known
partitioner        the same where only XLA's partitioner knows them
spreading          stacks that the partitioner spreads, where it cannot call back
lowering           what is chosen when a program is lowered: for export, for which devices
named_shardings    the partitioner's shardings by the names of a mesh's axes
horizontal_fusion  small results of many arrays, of which GPUs compute many in one kernel
=================  ===================================================================

Imports ``newton_schulz`` and ``sharding``.
"""
