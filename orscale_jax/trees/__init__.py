"""Trees of parameters: boxes, names and checks.

===========  =========================================================================
boxes        the nodes in which Flax and Haliax keep annotated parameters
differences  the first place at which two trees differ
functions    functions of the parameters, told from trees that are callable
masks        trees for a whole model, beside a part of it
names        the names of leaves, for rules, messages and tables
nodes        the nodes of a type in a tree
states       the arrays of a state, their parameters, and a check of them
updates      checks of the arguments of ``update``
watch        what optimizers note while they are traced, for an audit
===========  =========================================================================

Imports nothing of the package.
"""
