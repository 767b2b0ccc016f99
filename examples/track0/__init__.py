"""Methods from elsewhere as short programs, each with a chain that trains matrices.

The methods are for kernels whose last two axes are inputs and outputs, on one device.
``docs/methods.md`` says where they come from.

============  ====================================================================
mixed_emas    momentum of several timescales (bi-Maxwell, K-Maxwell)
blend         a blend of Q with the momentum (Contra-Muon, Soft-Muon)
neuron_floor  the update of each neuron is not small beside its weights (RowFloor)
ema_nesterov  gradients ahead of the weights, around any optimizer (EMA-Nesterov)
============  ====================================================================
"""
