"""The study: do OrScale's claims hold at desk scale? docs/study_protocol.md says how, and
docs/study_protocol_2.md how it goes on.

=========  ==========================================
workloads  models, data and lengths
prose      English text to train on
arms       the optimizers that are compared
runs       one run, with its learning rate and its seed
search     where to look for the best pair of learning rates
results    what runs came to, in tables
plan       the runs of an arm, each done once
second     the searches and runs of the second protocol
repeat     the runs of the first study, again
classes    ratios by class of layers, beside the model's optimum
=========  ==========================================
"""
