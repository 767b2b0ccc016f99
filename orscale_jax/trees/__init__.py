"""Trees of parameters: boxes, names and checks.

=======  =============================================================================
boxes    the nodes in which Flax and Haliax keep annotated parameters
names    the names of leaves, for rules, messages and tables
nodes    the nodes of a type in a tree
updates  checks of the arguments of ``update``
=======  =============================================================================

Imports nothing of the package.
"""
