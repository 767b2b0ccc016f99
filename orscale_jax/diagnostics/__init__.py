"""See what the optimizer does: readouts, the paper's theory measured, a report.

=================  =================================================================
read               norms, ratios and steps of every matrix, inside of jit
summarize          their mean, percentiles and shares, for any logger
layer_classes      the class of each parameter: attention query, routed expert up, ...
tabulate           a reading as columns on the host, with a row for every matrix
find_problems      what is wrong in a reading, what it means and what to do
History            the readings of a run in one file
decompose          how much of the ratios is uniform, growth or direction
measure            on a slower clock: stable ranks, convergence of Newton–Schulz
qk_norms           norms of query and key heads
estimate           signal, noise and smoothness of every matrix
secant_smoothness  smoothness from successive gradients
gain               what the ratios gain over Muon in the paper's model of a step
step_gain          what they gain along the step itself
verdict            whether they help, in a sentence
=================  =================================================================

``python -m orscale_jax.diagnostics FOLDER`` makes a report of a run. The functions above
are in ``readouts/`` and ``theory/``; the report is in ``report/``. All find the matrices
by :class:`~orscale_jax.transforms.matrices.Matrices`, as the optimizers do;
``per_matrix.py`` handles trees with one entry for each of them, and gathers the matrices
themselves.
"""

from orscale_jax.diagnostics.readouts.history import History as History
from orscale_jax.diagnostics.readouts.loggers import (
    JsonLines as JsonLines,
    TensorBoard as TensorBoard,
    to_floats as to_floats,
)
from orscale_jax.diagnostics.readouts.measure import (
    MEASUREMENTS as MEASUREMENTS,
    measure as measure,
)
from orscale_jax.diagnostics.readouts.problems import (
    Problem as Problem,
    find_problems as find_problems,
)
from orscale_jax.diagnostics.readouts.qk_norms import (
    QKNorms as QKNorms,
    qk_norms as qk_norms,
)
from orscale_jax.diagnostics.readouts.read import read as read
from orscale_jax.diagnostics.readouts.reading import Reading as Reading
from orscale_jax.diagnostics.readouts.summarize import summarize as summarize
from orscale_jax.diagnostics.readouts.tabulate import tabulate as tabulate
from orscale_jax.diagnostics.theory.curvature import curvature as curvature
from orscale_jax.diagnostics.theory.decompose import (
    Decomposition as Decomposition,
    decompose as decompose,
)
from orscale_jax.diagnostics.theory.estimate import (
    Statistics as Statistics,
    estimate as estimate,
)
from orscale_jax.diagnostics.theory.gain import Gain as Gain, gain as gain
from orscale_jax.diagnostics.theory.jackknife import Estimate as Estimate
from orscale_jax.diagnostics.theory.secant_smoothness import (
    secant_smoothness as secant_smoothness,
)
from orscale_jax.diagnostics.theory.step_gain import (
    StepGain as StepGain,
    step_gain as step_gain,
)
from orscale_jax.diagnostics.theory.verdict import Verdict as Verdict, verdict as verdict
from orscale_jax.parameters.layer_classes import layer_classes as layer_classes
