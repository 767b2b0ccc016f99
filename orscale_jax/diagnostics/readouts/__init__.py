"""Readouts of a running optimizer: what every training loop may want to see.

==============  =================================================================
read            norms, ratios and steps of every matrix, inside of ``jit``
reading         the type that ``read`` returns
learning_rates  the learning rate of each matrix in the last update
summarize       statistics of a reading as flat scalars
tabulate        a reading as columns on the host
problems        what is wrong in a reading, what it means and what to do
history         the readings of a run in one file
step_file       a CSV file with rows for each step, which survives being killed
loggers         writers of scalars: JSON lines, TensorBoard
measure         on a slower clock: stable ranks, convergence of Newton–Schulz
qk_norms        norms of query and key heads
==============  =================================================================
"""
