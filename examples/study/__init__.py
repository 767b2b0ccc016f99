"""The study: do OrScale's claims hold at desk scale? docs/study_protocol.md says how.

=========  ==========================================
workloads  models, data and lengths
arms       the optimizers that are compared
runs       one run, with its learning rate and its seed
=========  ==========================================
"""
