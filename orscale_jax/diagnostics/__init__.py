"""See what the optimizer does: readouts, warnings, a history.

=============  =====================================================================
read           norms, ratios and steps of every matrix, inside of jit
summarize      their mean, percentiles and shares, for any logger
layer_classes  the class of each parameter: attention query, routed expert up, ...
tabulate       a reading as columns on the host, with a row for every matrix
find_problems  what is wrong in a reading, what it means and what to do
History        the readings of a run in one file
measure        on a slower clock: stable ranks, convergence of Newton–Schulz
=============  =====================================================================

All find the matrices by :class:`~orscale_jax.transforms.matrices.Matrices`, as the
optimizers do.
"""

from orscale_jax.diagnostics.history import History as History
from orscale_jax.diagnostics.measure import measure as measure
from orscale_jax.diagnostics.problems import (
    Problem as Problem,
    find_problems as find_problems,
)
from orscale_jax.diagnostics.reading import Reading as Reading, read as read
from orscale_jax.diagnostics.summaries import summarize as summarize, tabulate as tabulate
from orscale_jax.parameters.layer_classes import layer_classes as layer_classes
