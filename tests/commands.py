"""Commands of the training program, in processes of their own."""

import dataclasses
import glob
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from tests import faulty
from tests.examples.pretrain import tiny

LIMIT = 900  # Seconds after which a process hangs, on however busy a machine.


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
    tables: bool = True  # Whether its tables are whole.

    def at(self, out: pathlib.Path) -> "Run":
        """The same command for another folder."""
        return dataclasses.replace(self, out=out)

    def copy(self, out: pathlib.Path) -> "Run":
        """The same with all that is there."""
        shutil.copytree(self.out, out)
        return self.at(out)

    def start(
        self, *module: str, of_last: Sequence[str] = (), piped: bool = False
    ) -> "Processes":
        """Starts it as another module, or with other options of the last process.

        What the first process prints goes to its log, or into a pipe.
        """
        command = [sys.executable, "-m", *(module or ("examples.pretrain",))]
        command += [*self.options, "--out", str(self.out)]
        for file in self.out.parent.glob(f"{glob.escape(self.out.name)}.*"):
            if file.suffix == ".go" or ".reached." in file.name:
                file.unlink()
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
            others = of_last if index == self.processes - 1 else ()
            with open(self._log(index), "w") as log:
                process = subprocess.Popen(
                    [*command, *others],
                    cwd=tiny.ROOT,
                    env=environment | {"JAX_PROCESS_ID": str(index)},
                    stdout=subprocess.PIPE if piped and index == 0 else log,
                    stderr=log,
                )
            started.append(process)
        return Processes(self, started)

    def hold(self, step: int) -> "Processes":
        """Starts it, and comes back once all processes wait at this step."""
        processes = self.start("tests.faulty", "hold", str(step))
        files = [faulty.reached(self.out, index) for index in range(self.processes)]
        processes.wait(lambda: all(file.exists() for file in files), f"step {step}")
        return processes

    def go_on(self) -> None:
        """Lets processes go on that hold."""
        faulty.let_go(self.out).touch()

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
        tables = self.tables and other.tables
        mine, others = self._result(tables), other._result(tables)
        check(mine.keys() == others.keys(), "other arrays than without faults")
        for name in mine:
            same = np.array_equal(mine[name], others[name])
            check(same, f"{name} is not what it is without faults")

    def _log(self, index: int) -> pathlib.Path:
        return self.out.with_name(f"{self.out.name}.log.{index}")

    def _result(self, tables: bool) -> dict[str, np.ndarray]:
        """The last state by name, and what is written down of every step."""
        state = tiny.last_state(self.folder)
        if not tables:
            return state
        rows = [row | {"seconds": ""} for row in tiny.rows(self.folder / "metrics.csv")]
        history = (self.folder / "history.csv").read_text()
        return state | {"metrics.csv": np.array(rows), "history.csv": np.array(history)}


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

    def read_a_line(self) -> None:
        """Reads a line of what the first process prints into a pipe, and closes it."""
        pipe = self._processes[0].stdout
        pipe.readline()
        pipe.close()

    def end_with(self, expected: Callable[[list[int]], bool]) -> None:
        """Waits until all have ended, and checks their exit codes."""
        self._wait(lambda: None not in self._codes(), "end")
        codes = self._codes()
        check(expected(codes), f"exit codes {codes}:\n{self._run.messages()}")

    def wait(self, until: Callable[[], bool], what: str) -> None:
        """Waits for what running processes do."""

        def there() -> bool:
            running = set(self._codes()) == {None}
            check(running or until(), f"ended before {what}:\n{self._run.messages()}")
            return until()

        self._wait(there, what)

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

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
