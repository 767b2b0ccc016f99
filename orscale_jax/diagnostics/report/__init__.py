"""The report of a run: one HTML page and its figures.

Needs matplotlib and pandas, the extra ``orscale-jax[report]``.

============  ==============================================================
page          the public ``write_report``
run           a run folder, read into data frames
readings      rows of the history as readings
gains         the verdict, and the gain at each estimate
findings      the texts on verdict and warnings; the key numbers
figures       the figures, in their order, with their captions
trajectories  figures over the steps
snapshots     figures of the last step
heatmap       the heat map
theory        figures of the theory
tables        tables in HTML
style         the look of the figures
============  ==============================================================
"""

from orscale_jax.diagnostics.report.page import write_report as write_report
from orscale_jax.diagnostics.report.run import RunError as RunError
