"""The paper's theory, measured: signal, curvature, and the gain over Muon.

=================  ==============================================================
decompose          how much of the ratios is uniform, growth or direction
estimate           signal, noise and smoothness of every matrix
batches            the micro-batches and loss functions that are given
samples            what they take from one micro-batch
jackknife          estimates with standard errors, from samples
secant_smoothness  smoothness from successive gradients
curvature          the curvature of the paper's model
gain               what the ratios gain over Muon in the paper's model of a step
kappas             the same with standard errors
step_gain          what they gain along the step itself
verdict            whether they help, in a sentence
verdict_rules      the cases of a verdict
=================  ==============================================================
"""
