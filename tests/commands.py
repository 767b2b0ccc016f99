"""Commands of the training program, in processes of their own."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

from tests.examples.pretrain import tiny

LIMIT = 300  # Seconds for what should take some, on a busy machine.


@dataclasses.dataclass(frozen=True)
class Run:
    """A command for one process or several, and the folder that it writes to."""

    out: pathlib.Path
    options: tuple[str, ...]
    processes: int = 1
    devices: int = 1  # Of each process.

    def finish(self) -> None:
        """Runs to the end."""
        command = [sys.executable, "-m", "examples.pretrain"]
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
        try:
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
            codes = [process.wait(LIMIT) for process in started]
        finally:
            for process in started:
                process.kill()
        assert set(codes) == {0}, f"exit codes {codes}:\n{self.messages()}"

    @property
    def folder(self) -> pathlib.Path:
        """That of its optimizer."""
        return self.out / self.options[self.options.index("--optimizer") + 1]

    def messages(self, *indices: int) -> str:
        """What processes wrote when they last ran: some of them, or all."""
        indices = indices or tuple(range(self.processes))
        return "\n".join(self._log(index).read_text() for index in indices)

    def _log(self, index: int) -> pathlib.Path:
        return self.out.with_name(f"{self.out.name}.log.{index}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
