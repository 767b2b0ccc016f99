"""The study: do OrScale's claims hold at desk scale? docs/study_protocol.md says how.

==================  ==================================================================
workloads, prose    models, lengths and data; English text to train on
arms                the optimizers that are compared
runs                one run, with its learning rate and its seed
search              where to look for the best learning rate
results, study      what runs came to, in tables; all of them
plan, runner        which runs an arm calls for; doing them, a process for every core
gains, seconds      what is measured besides: the theory's statistics, the time of a step
statistics, claims  what the tables say; verdicts on the paper's claims
report              the page, by the following
figures, tables     its parts
==================  ==================================================================
"""
