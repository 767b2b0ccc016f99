"""The audit before a run: what an optimizer will do with each parameter.

It only reports: no part of it runs in ``update``.

===========  =======================================================================
describe     the public ``describe``
description  ``Description``, its rows and sums, and the table that ``print`` shows
plan         the report of the plan of Newton–Schulz
probe        what an optimizer's first update does
certificate  whether an update on a mesh is that of one device, and what is sent for it
program      what a compiled program sends and multiplies
state        the abstract state of an optimizer, by parameter
checks       reasons to look at a matrix
===========  =======================================================================

Imports ``family`` and everything below it; only the package itself imports it.
"""
