"""The paper's theory, measured: signal, noise and smoothness, and the gain over Muon.

========  ============================================================
estimate  signal, noise and smoothness of every matrix
gain      what ratios gain over Muon in the paper's model of a step
========  ============================================================
"""

from examples.study.theory.estimate import estimate as estimate
from examples.study.theory.gain import curvature as curvature, gain as gain
