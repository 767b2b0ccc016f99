"""The paper's language models in Flax NNX.

=========  ==========================================================================
dense      the decoder of the 125M to 1.1B runs
moonlight  Moonlight-16B-A3B: latent attention, routed and shared experts
attention  the platform's fused attention, or products written out
experts    a token's products with its experts
layers     linear layers, norms, rotary positions, MLPs, stacks of blocks
sharding   logical names of axes, and the table from them to axes of the mesh
=========  ==========================================================================

Suffixes of array names: B sequences, T positions, D width, N heads, H width of a head,
F width of an MLP, V vocabulary, L layers.
"""
