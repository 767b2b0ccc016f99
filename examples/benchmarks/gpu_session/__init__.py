"""Everything that is to be measured on one GPU, by one command.

    python -m examples.benchmarks.gpu_session                      # all stages
    python -m examples.benchmarks.gpu_session --stage steps forms  # some
    python -m examples.benchmarks.gpu_session --tiny               # a trial on a CPU

Each stage writes a table, STAGE.csv, and a figure of it, STAGE.png, into the folder that
``--out`` names. A case that the table holds for this card is not measured again, so the
same command goes on where it was interrupted; for another version of JAX, name another
folder. A stage starts no new case after ``--seconds``, and says which are left.

A row has the quartiles of one quantity, and with what they were measured: the card, its
driver and the clock of its multiprocessors right after the case, which ``nvidia-smi``
tells (empty without it), and the version of JAX. Needs JAX, Flax, Optax and Matplotlib.

The shared parts come first, then the stages in their order.

===========  =========================================================================
card         the card, its driver and its clock
table        the rows of a stage as a CSV file
stage        a stage is a list of cases; what runs those that are missing
figure       the quartiles of a quantity, by case and variant
rates        the card's rate of matrix products, and shares of it
stepping     what one step of an optimizer takes: time, share of that rate, memory
decoders     decoders and their optimizers, for training
oracle       the polar factor and Algorithm 1 in float64, in NumPy
correctness  ``polar_factor`` and ``orscale`` against the oracle
steps        steps of five optimizers on the shapes of five models
forms        bfloat16 and float16; the Gram form and the plain iteration
symmetric    symmetric products in strips and whole
training     a training step of GPT-2 124M: the optimizer's share, FLOP utilization
losses       decoders of 31M to 125M parameters, trained on the standard library
recipe       steps on the matrices of a mixture of experts, as many as fit one card
===========  =========================================================================
"""
