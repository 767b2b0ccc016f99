"""Commands of the training program, in processes of their own."""

import dataclasses
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tests.examples.pretrain import tiny

LIMIT = 300  # Seconds for what should take some, on a busy machine.


class Failed(Exception):
    """A run that is not as it should be."""


def check(fine: object, message: str) -> None:
    if not fine:
        raise Failed(message)


@dataclasses.dataclass(frozen=True)
class Run:
    """A command for one process or several, and the folder that it writes to."""

    out: pathlib.Path
    options: tuple[str, ...]
    processes: int = 1
    devices: int = 1  # Of each process.

    def at(self, out: pathlib.Path) -> "Run":
        """The same command for another folder."""
        return dataclasses.replace(self, out=out)

    def copy(self, out: pathlib.Path) -> "Run":
        """The same with all that is there."""
        shutil.copytree(self.out, out)
        return self.at(out)

    def start(self, *module: str) -> "Processes":
        command = [sys.executable, "-m", *(module or ("examples.pretrain",))]
        command += [*self.options, "--out", str(self.out)]
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
        }
        if self.processes > 1:
            command.append("--distributed")
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
                "JAX_NUM_PROCESSES": str(self.processes),
                # It spares the first process alone to compile, and Gloo waits for the
                # others no longer than 30 s.
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            }
        started = []
        for index in range(self.processes):
            with open(self._log(index), "w") as log:
                process = subprocess.Popen(
                    command,
                    cwd=tiny.ROOT,
                    env=environment | {"JAX_PROCESS_ID": str(index)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            started.append(process)
        return Processes(self, started)

    def finish(self) -> None:
        """Runs to the end."""
        with self.start() as processes:
            processes.end_with(lambda codes: set(codes) == {0})

    @property
    def folder(self) -> pathlib.Path:
        """That of its optimizer."""
        return self.out / self.options[self.options.index("--optimizer") + 1]

    def steps(self) -> int:
        """Steps that are written down."""
        path = self.folder / "metrics.csv"
        return len(tiny.rows(path)) if path.exists() else 0

    def checkpoints(self) -> list[int]:
        """Steps of complete checkpoints."""
        folders = (self.folder / "checkpoints").glob("*")
        return sorted(int(folder.name) for folder in folders if folder.name.isdigit())

    def messages(self, *indices: int) -> str:
        """What processes wrote when they last ran: some of them, or all."""
        indices = indices or tuple(range(self.processes))
        return "\n".join(self._log(index).read_text() for index in indices)

    def equals(self, other: "Run") -> None:
        """Checks that results are the same to the bit."""
        mine, others = self._result(), other._result()
        check(mine.keys() == others.keys(), "other arrays than without faults")
        for name in mine:
            same = np.array_equal(mine[name], others[name])
            check(same, f"{name} is not what it is without faults")

    def _log(self, index: int) -> pathlib.Path:
        return self.out.with_name(f"{self.out.name}.log.{index}")

    def _result(self) -> dict[str, np.ndarray]:
        """The last state by name, and what is written down of every step."""
        rows = [row | {"seconds": ""} for row in tiny.rows(self.folder / "metrics.csv")]
        result = tiny.last_state(self.folder) | {"metrics.csv": np.array(rows)}
        if (history := self.folder / "history.csv").exists():
            result["history.csv"] = np.array(history.read_text())
        return result


class Processes:
    """The processes of a run that is going on; a context manager that ends them."""

    def __init__(self, run: Run, processes: list[subprocess.Popen]):
        self._run, self._processes = run, processes

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def send(self, signum: int, *indices: int) -> None:
        """Sends a signal to some of them, or to all."""
        for index in indices or range(len(self._processes)):
            self._processes[index].send_signal(signum)

    def wait_for_step(self, step: float) -> None:
        """Waits until as many steps are written down."""

        def there() -> bool:
            running = None in (process.poll() for process in self._processes)
            check(running, f"ended before step {step}:\n{self._run.messages()}")
            return self._run.steps() >= step

        self._wait(there, f"step {step}")

    def end_with(self, expected: Callable[[list[int]], bool]) -> None:
        """Waits until all have ended, and checks their exit codes."""
        self._wait(lambda: None not in [p.poll() for p in self._processes], "end")
        codes = [process.returncode for process in self._processes]
        check(expected(codes), f"exit codes {codes}:\n{self._run.messages()}")

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        latest = time.monotonic() + LIMIT
        while not until():
            late = time.monotonic() > latest
            check(not late, f"no {what} within {LIMIT} s:\n{self._run.messages()}")
            time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
