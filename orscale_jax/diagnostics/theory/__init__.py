"""The paper's theory, measured: signal, curvature, and the gain over Muon.

=================  ==============================================================
decompose          how much of the ratios is uniform, growth or direction
estimate           signal, noise and smoothness of every matrix
samples            the micro-batches that are given, and what is taken from each
jackknife          estimates with standard errors, from samples
secant_smoothness  smoothness from successive gradients
curvature          the curvature of the paper's model
gain               what the ratios gain over Muon in the paper's model of a step, also
                   with standard errors
step_gain          what they gain along the step itself
verdict            whether they help, in a sentence
verdict_rules      the cases of a verdict
=================  ==============================================================
"""
