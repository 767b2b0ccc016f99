"""The study: do OrScale's claims hold at desk scale?

=============  ==========================================================================
contrasts      what the second study found, from the losses in docs/data
curves         how early Muon passes AdamW's final loss, from the validation curves
statistics     paired differences with intervals; Holm's correction
repeat         trains a part of the second study again
workloads      its models, their data and how long they are trained
tuning         decoders of code, tuned on prose
tuned          what the rows of these runs say
=============  ==========================================================================

The study is closed, but for tuning, which has a protocol of its own. Its other programs
are those of older commits: 38cab27 for the first study, the searches of the second and
the side protocols; 85af6ba for the third study's runs, the optimizers that only the study
had, and the paper's model of the gain; 11ff6128 for the third study's tables.
"""
