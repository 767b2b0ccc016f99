"""Which parameters are matrices, along which axes, and by which rule.

=================  ===================================================================
axes               the matrices in a leaf: conversion in both directions
dimension_numbers  dimension numbers to axes, for a whole tree; the default rule
expressions        regular expressions over paths; the first that matches decides
path_rules         the public ``by_path``
heads              each head of attention as a matrix
layer_classes      the class of a layer, by names on its path and beside it
module_types       dimension numbers from the types of modules
output_layers      the kernels whose product a model returns, from its trace
=================  ===================================================================

Imports ``sharding``, ``trees`` and ``validate``.
"""
