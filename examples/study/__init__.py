"""The study: do OrScale's claims hold at desk scale? docs/study/study_protocol.md says
how, and docs/study/study_protocol_2.md and docs/study/study_protocol_3.md how it goes on.

==================  ==================================================================
workloads, prose    models, lengths and data; English text to train on
arms                the optimizers that are compared
controls            those that only the study has: deleted designs, shared ratios
runs                one run, with its learning rates and its seed
search              where to look for the best pair of learning rates
results, study      what runs came to, in tables; all of them
plan, second        the runs of an arm; the searches and runs of the second protocol
repeat              the runs of the first study, again
gains, seconds      what is measured besides: the theory's statistics, the time of a step
theory              the paper's theory, measured
classes             ratios by class of layers, beside the model's optimum
statistics, claims  what the tables say; verdicts on the paper's claims
records             what the tables hold of the second protocol
questions           its endpoints, its list, and what it only reports
selection, optima   how well its searches choose; ratios beside the model's optimum
contrasts           what replicates in it, and what the first batch decided
two_rates           its page, by the following
second_tables       the page's tables
second_figures      the page's figures
surface             where both rates and the decay are best
third               the runs of the third protocol: a ladder of experts, anew
third_tables        its endpoints
low_memory          momenta and weights in fewer bits: its runs and its tables
per_head            each head of attention as a matrix: its runs and its table
better_rule         candidates for a better rule: their runs and their table
report              the page, by the following
figures, tables     its parts
==================  ==================================================================
"""
