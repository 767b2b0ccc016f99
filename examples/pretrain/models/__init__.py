"""The paper's dense decoder in Flax NNX, and what it shares with other language models.

========  ==========================================================================
dense     the decoder of the 125M to 1.1B runs
layers    linear layers, norms, rotary positions, MLPs, stacks of blocks
sharding  logical names of axes, and the table from them to axes of the mesh
========  ==========================================================================

Suffixes of array names: B sequences, T positions, D width, N heads, H width of a head,
F width of an MLP, V vocabulary, L layers.
"""
