"""Which parameters are matrices, along which axes, and by which rule.

==================  ==================================================================
axes                the matrices in a leaf: conversion in both directions
dimension_numbers   dimension numbers to axes, for a whole tree
default_rule        the rule for parameters without dimension numbers
expressions         regular expressions over paths; the first that matches decides
path_rules          the public ``by_path``
per_head            the public ``PerHead``
projections         the heads of one projection of attention
head_rules          which projections are divided into heads, for a whole tree
rate_multipliers    multipliers of the learning rate, by path or as a tree
layer_classes       the public ``layer_classes``
classes_by_name     the class of a layer, by names on its path and beside it
layer_names         the names by which it recognizes them
module_types        dimension numbers from the types of modules
resolution          overrides, names and types, in this order
module_trees        models that are trees of modules
==================  ==================================================================

Imports ``sharding``, ``trees`` and ``_checks``.
"""
