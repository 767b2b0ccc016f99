"""Track 0: a leaderboard of optimizers that two cores settle within an hour.

    python -m examples.track0 MODULE:FACTORY [--name NAME]

The page ``docs/track0.md`` has the protocol and says how to add an entry.

============  ====================================================================
workloads     what is trained: four texts that decide, and images
factories     a user's factory: called with rates and axes, and checked
runs          one run: the losses of a workload with a factory, two rates and a seed
losses        the runs of an entry on disk, which a killed row continues
search        two rates, by a star of factor 2 and the parabola through it
row           a row: the search and the fresh seeds
workers       processes that train
table         intervals, verdicts and the table of all rows
prose         the text of one workload
entries       optimizers of the table that need more than an import
low_memory    what 24-bit weights and 8-bit moments cost in loss (``docs/memory.md``)
mixed_emas    momentum of several timescales (bi-Maxwell, K-Maxwell)
blend         a blend of Q with the momentum (Contra-Muon, Soft-Muon)
neuron_floor  the update of each neuron is not small beside its weights (RowFloor)
ema_nesterov  gradients ahead of the weights, around any optimizer (EMA-Nesterov)
============  ====================================================================

The last four are methods from elsewhere (``docs/methods.md``), for kernels whose last two
axes are inputs and outputs, on one device.
"""
