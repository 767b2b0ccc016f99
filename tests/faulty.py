"""The training program with a fault: ``python -m tests.faulty <fault> <step> <options>``.

The fault comes at the first pause after so many steps:

=======  ========================================================================
hold     says that it is there, and waits until the other side has let it go on
kill     kills itself in the middle of a checkpoint's write
spoil    makes one weight NaN, of which the loss of this step knows nothing
=======  ========================================================================
"""

import os
import pathlib
import signal
import sys
import time
from typing import Any

import jax

from examples.pretrain.__main__ import main
from examples.pretrain.operation import run
from examples.pretrain.operation.checkpoint import Checkpoints
from examples.pretrain.operation.processes import leaving_in_time


def reached(out: pathlib.Path, index: int) -> pathlib.Path:
    """The file by which a process says that it holds."""
    return out.with_name(f"{out.name}.reached.{index}")


def let_go(out: pathlib.Path) -> pathlib.Path:
    """The file for which it waits."""
    return out.with_name(f"{out.name}.go")


def hold(step: int) -> None:
    """The step is computed, and neither written down nor saved."""
    out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
    check_finite = run.check_finite

    def held(interval: Any, last_checkpoint: int | None) -> None:
        if interval.step >= step:
            reached(out, jax.process_index()).touch()
            while not let_go(out).exists():
                time.sleep(0.001)
            # Several processes take about a second to agree on the step at which they
            # stop, in which small models would come to their end.
            time.sleep(0.5 * (jax.process_count() > 1))
        check_finite(interval, last_checkpoint)

    run.check_finite = held


def kill(step: int) -> None:
    save = Checkpoints.save

    def killed(checkpoints: Checkpoints, at: int, state: Any) -> None:
        save(checkpoints, at, state)
        if at >= step:  # It is written in the background.
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpoints.save = killed


def spoil(step: int) -> None:
    save = Checkpoints.save

    def spoiled(checkpoints: Checkpoints, at: int, state: Any) -> None:
        if at >= step:
            leaves, structure = jax.tree.flatten(state)
            leaves[-1] = leaves[-1].at[(0,) * leaves[-1].ndim].set(jax.numpy.nan)
            state = jax.tree.unflatten(structure, leaves)
        save(checkpoints, at, state)

    Checkpoints.save = spoiled


if __name__ == "__main__":
    {"hold": hold, "kill": kill, "spoil": spoil}[sys.argv[1]](int(sys.argv[2]))
    with leaving_in_time():
        sys.exit(main(sys.argv[3:]))
