"""What operates a training: folders, checkpoints, signals, logs, a report.

The loop in `examples.pretrain.train` knows nothing of it.

==========  ==================================================================
run         every optimizer in turn, from its last checkpoint to the report
rundir      the folder of a run: one process, one configuration
checkpoint  saving and restoring, and the model of a run
processes   one or many; signals; files that cannot be written
peaks       peak FLOPs per second of accelerators
logs        what a run tells as it goes: metrics, readings, progress, warnings
report      what a run shows at its end: a table and reports
==========  ==================================================================
"""
