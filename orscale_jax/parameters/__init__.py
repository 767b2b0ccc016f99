"""Which parameters are matrices, along which axes, and by which rule.

=================  ===================================================================
axes               the matrices in a leaf: conversion in both directions
dimension_numbers  dimension numbers to axes, for a whole tree; the default rule
path_rules         regular expressions over paths; the public ``by_path``
kinds              embeddings, heads, norms, scales and biases, by their names
module_types       dimension numbers from the types of modules
output_layers      the kernels whose product a model returns, from its trace
=================  ===================================================================

Imports ``sharding``, ``trees`` and ``validate``.
"""
