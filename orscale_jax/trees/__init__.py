"""Trees of parameters: boxes, names and checks.

=======  ==============================================================================
boxes    the nodes in which Flax and Haliax keep annotated parameters
checks   the arguments of ``update``; the arrays of a state, and their parameters
names    the names of leaves, for rules, messages and tables
nodes    nodes that are masked, of a type, or functions; what an audit takes note of
=======  ==============================================================================

Imports nothing of the package.
"""
