"""The audit before a run: what an optimizer will do with each parameter.

It only reports: no part of it runs in ``update``.

===============  ===================================================================
describe         the public ``describe``
description      ``Description``: rows, sums and plan, as a table
rows             ``ParameterRow`` and ``Total``
merging          names that differ only by numbers, as one name
plans            ``Stack`` and ``Placed``: the plan that the optimizer executes, for rows
state            the abstract state of an optimizer, by parameter
state_trees      the trees like the parameters in it, and who keeps them
checks           reasons to look at a matrix
tables           tables of strings, for terminals and notebooks
===============  ===================================================================

Imports every other folder; nothing imports it but the package itself.
"""
