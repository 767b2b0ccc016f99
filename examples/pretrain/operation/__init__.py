"""What operates a training: folders, checkpoints, signals, logs, a report.

The loop in `examples.pretrain.train` knows nothing of it.

======================  ==============================================================
run                     every optimizer in turn, from its last checkpoint to the report
rundir                  the folder of a run: one process, one configuration
checkpoint, checksums   saving and restoring
saved                   the model of a run, from its newest checkpoint
stop, processes         signals; one process or many
logs                    what a run tells as it goes, by the following
records, readouts       metrics and the optimizer's readings, as files
progress, throughput    on the terminal
tensorboard             event files
peaks                   peak FLOPs per second of accelerators
timing                  seconds of a step, and of its optimizer
report, plots, titles   what a run shows at its end
write_failures          one message where a file cannot be written
compilation_cache       one message where JAX's cache fails
======================  ==============================================================
"""
