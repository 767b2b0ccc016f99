"""Everything that is to be measured on one GPU, by one command.

    python -m examples.benchmarks.gpu_session                      # nine minutes
    python -m examples.benchmarks.gpu_session --stage steps        # some
    python -m examples.benchmarks.gpu_session --stage pretraining  # 14 minutes
    python -m examples.benchmarks.gpu_session --tiny               # a trial on a CPU

Stages take turns, what is wanted most first. Each writes a table, STAGE.csv, into the
folder that ``--out`` names. What the table holds for this card is not measured again, so
the same command goes on where it was interrupted; for another version of JAX, name
another folder. No case is started after ``--seconds``, which are those of the whole
session, and those that are left are told.

A row has the quartiles of one quantity, and with what they were measured: the card, its
driver and the clock of its multiprocessors right after the case, which ``nvidia-smi``
tells (empty without it), and the version of JAX. Needs JAX, Flax and Optax.
"""
