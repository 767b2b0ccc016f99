"""The paper's theory, measured: signal, curvature, and the gain over Muon in its model.

=================  ==============================================================
decompose          how much of the ratios is uniform, growth or direction
estimate           signal, noise and smoothness of every matrix
samples            what is taken from each micro-batch
jackknife          estimates with standard errors, from samples
secant_smoothness  smoothness from successive gradients
curvature          the curvature of the paper's model
gain               what the ratios gain over Muon in the paper's model of a step, also
                   with standard errors
verdict            whether they help, in a sentence
verdict_rules      the cases of a verdict
per_matrix         trees with one entry for each matrix as vectors
=================  ==============================================================
"""

from examples.study.theory.curvature import curvature as curvature
from examples.study.theory.decompose import decompose as decompose
from examples.study.theory.estimate import estimate as estimate
from examples.study.theory.gain import gain as gain
from examples.study.theory.secant_smoothness import secant_smoothness as secant_smoothness
from examples.study.theory.verdict import verdict as verdict
