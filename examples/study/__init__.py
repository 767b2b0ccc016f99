"""The study: do OrScale's claims hold at desk scale? docs/study_protocol.md says how.

=========  ==========================================
workloads  models, data and lengths
prose      English text to train on
arms       the optimizers that are compared
runs       one run, with its learning rate and its seed
search     where to look for the best learning rate
results    what runs came to, in tables
plan       which runs an arm calls for
runner     all runs, with a process for every core
=========  ==========================================
"""
