"""The paper's language models in Flax NNX, and what they share.

================  ==================================================================
dense             the decoder of the 125M to 1.1B runs
moonlight         Moonlight-16B-A3B: latent attention and a mixture of experts
moonlight_config  its sizes
latent_attention  its attention
mixture           its router, routed experts and shared experts
grouped           rows times the matrix of their group
layers            linear layers, norms, rotary positions, MLPs, stacks of blocks
sharding          logical names of axes, and the table from them to axes of the mesh
================  ==================================================================

Suffixes of array names: B sequences, T positions, D width, N heads, H width of a head,
F width of an MLP, V vocabulary, L layers, E experts, K experts of a token.
"""
