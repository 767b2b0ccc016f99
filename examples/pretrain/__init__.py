"""A training program: the paper's models, recipes and optimizers, from a laptop to a pod.

    python -m examples.pretrain --data book.txt           # one's own text: AdamW and Muon
    python -m examples.pretrain --recipe demo             # the demo: minutes on 2 cores
    python -m examples.pretrain --recipe 125m-orscale --data shards/*.bin
    python -m examples.pretrain --recipe demo-moe --help  # every option
    python -m examples.pretrain.sample --run RUN "text"   # what its models write

Read `train` and `step` first: the loop, and what a step does with the optimizer. They
import what the first rows name and no model, file format or checkpoint.

==========  ================================================================
train       the loop over the steps, and validation
step        a step: gradient, optimizer, the model's other variables
setup       the training state, sharded, before there is any array
task        what the loop asks of a model and of its data
config      the options of a run, and the values that are refused
layers      a step that holds the gradients of one block at a time
optimizers  every optimizer that a recipe may name
meshes      the mesh, and the table from logical names to its axes
loading     the examples of each batch, and which of them a process reads
errors      messages instead of tracebacks
output      what a command prints
tasks       models, their losses and their data
models/     the dense decoder and a mixture of experts
loss        the cross-entropy of a language model
data        which files of text or tokens
batches     which windows of them a step sees
recipes     runs by name: own text, the demos, the paper's
curves      the validation losses of a run, as text and as a picture
operation/  folders, checkpoints, signals, logs and the report
sample      text that the models of a run write
==========  ================================================================
"""
