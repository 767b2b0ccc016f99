"""The stages of OrScale and its relatives, and wrappers around whole optimizers.

momentum              G to M̃, with a state of floats or 8-bit integers; Adam's in float16
int8_blocks           arrays as 8-bit integers and a scale for each block of them
orthogonalize         M̃ to Q
balance               M̃ to Q with vectors of nearly one norm along the longer side
shape                 Q to sQ
decay                 adds λW: to all entries, or cautiously
first_update          waits for a matrix's first update
trust_ratio, anchors  multiplies by the clipped, calibrated ratio; rules that set c
pooled_ratio          one ratio for all matrices, or for each class
altered_ratio         the ratio of the ablations
recorded_ratio        multiplies by the ratios of another run
neuron_rms            divides neurons by their running root mean square
normalize             scales neurons and inputs to norm 1
multiplied_rate       the learning rate with multipliers of matrices and parameters
initial_norm          keeps the norms of the matrices
master_weights        wraps any optimizer, for bfloat16 weights that lose no update
matrices              the matrices of a tree, and arrays with one entry for each
boundary              the one place where boxes, dtypes and axes are resolved
dtypes                the dtype of norms and ratios
qk_clip               finds queries and keys, and rescales those of large logits
====================  ================================================================
=======
==================  ==================================================================
matrices            the matrices of a tree; the boundary between users and stages
momentum            G to M̃, with a state of floats or 8-bit integers; Adam's in float16
orthogonalize       M̃ to Q
stages              s, λW, the wait for a matrix's first update, the learning rates
trust_ratio         multiplies D by the clipped, calibrated ratio; the rules that set c
relatives           the stages of NorMuon, Muon+, Aurora, Hyperball, cautious decay
master_weights      wraps any optimizer, for bfloat16 weights that lose no update
qk_clip             finds queries and keys, and rescales those of large logits
==================  ==================================================================

Imports ``distributed``, ``newton_schulz``, ``parameters``, ``sharding``, ``trees`` and
``_checks``.
"""
