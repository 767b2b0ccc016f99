"""Moonlight (arXiv:2502.16982): latent attention and a mixture of experts.

================  ==================================================================
model             the model, and which of its parameters are matrices
config            its sizes
latent_attention  its attention
mixture           its router, routed experts and shared experts
grouped           rows times the matrix of their group
task              its loss, and the routing biases after a step
================  ==================================================================

Suffixes of array names are those of `examples.pretrain.models`, and E experts, K experts
of a token.
"""
