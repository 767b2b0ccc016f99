"""The study: do OrScale's claims hold at desk scale? docs/study/study_protocol_2.md and
docs/study/study_protocol_3.md say how.

==================  ==================================================================
workloads, prose    models, their data and how long; English text to train on
controls            optimizers that only the study has: deleted designs, shared ratios
search              where to look for the best learning rates and weight decay
runs                one run, with its settings and its seed
results             what runs came to, in tables; each run is done once
statistics          paired differences with intervals; Holm's correction
contrasts           what the study found, from the losses in docs/data
repeat              a part of the study, again
third               the runs of the third protocol: a ladder of experts, anew
third_tables        its endpoints
theory              the paper's theory, measured
==================  ==================================================================

The first study, the searches of the second and the side protocols are finished: their
programs are those of commit 38cab27 (tag study-2026-11).
"""
