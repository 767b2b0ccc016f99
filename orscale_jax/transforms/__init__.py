"""The stages of OrScale and Muon, and wrappers around whole optimizers.

==================  ==================================================================
matrices            the matrices of a tree; the boundary between users and stages
momentum            G to M̃, with a state of floats or 8-bit integers; Adam's in float16
mixed_emas          G to M̃, of several timescales
orthogonalize       M̃ to Q
blend               M̃ to a blend of Q and M̃
stages              s, λW, and D = 0 where the momentum is zero
trust_ratio         multiplies D by the clipped, calibrated ratio; the rules that set c
neuron_floor        raises a neuron's small update: a trust ratio from below
scale_by_path       multiplies the updates of some parameters, after any optimizer
master_weights      wraps any optimizer, for bfloat16 weights that lose no update
ema_nesterov        wraps any optimizer, for gradients ahead of the weights
qk_clip             finds queries and keys, and rescales those of large logits
==================  ==================================================================

Imports ``distributed``, ``newton_schulz``, ``parameters``, ``sharding``, ``trees`` and
``validate``.
"""
