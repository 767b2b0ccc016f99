"""Trains a small decoder with AdamW, Muon+Moonlight and OrScale at one learning rate.

    python -m examples.pretrain                 # the demo: about 3 minutes on 2 cores
    python -m examples.pretrain --help          # every option
    python -m examples.pretrain.compare RUN...  # several seeds side by side

Read in this order: `config` (options), `model`, `data` and `shards` (which files),
`batches` (which windows at which step), `arms` (the optimizers), `train` (the loop).
What a run leaves behind: `rundir`, `records`, `checkpoint`; what it shows: `progress`,
`timing`, `report`, `plots`.
"""
