"""A training program: the paper's models, recipes and optimizers, from a laptop to a pod.

    python -m examples.pretrain                           # the demo: minutes on 2 cores
    python -m examples.pretrain --recipe 125m-orscale --data shards/*.bin
    python -m examples.pretrain --recipe demo-moe --help  # every option
    python -m examples.pretrain.compare RUN...            # several seeds side by side

Read in this order:

===========================  =========================================================
recipe, config               the options: what decides the result, and where and how it
                             runs
recipes, configs             those of the paper's runs and of the demos, by name
optimizers, controls         every optimizer that a recipe may name; those of the study
unused                       options that would change nothing
models/, tasks/              the models; their losses and data as the trainer sees them
loss                         the cross-entropy of a language model
data, shards                 which files, and which windows of them
batches, loading             which examples a batch has, and which of them a process reads
meshes                       the mesh, and the table from logical names to its axes
setup, step                  the training state, sharded; the step from one to the next
train                        the loop
evaluation                   validation
checkpoint, checksums        saving and restoring
rundir                       the folder of a run
stop, processes              signals; one process or many
logs                         what a run tells, by the following
records, readouts            metrics and the optimizer's readings, as files
progress, throughput         on the terminal
report, plots, titles        what a run shows at its end
compare                      several runs side by side
timing                       the seconds of a step
compile_only                 the step for a pod, compiled on any machine
functional                   the same models and data as plain functions, for experiments
errors, compilation_cache    messages where something fails
===========================  =========================================================
"""
