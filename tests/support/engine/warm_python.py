"""Python processes that begin with torch imported: forks of a process that has done so once.

Importing torch and Transformers takes two seconds of processor, longer than most of what tests run in processes of
their own. A process that is started here is no child of the test's: a test of who ends with whom starts its own.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch.distributed.tensor", "transformers", "mbd_core.engine.parallel.follow"]  # none of them starts a thread
)


class WarmPython:
    """`[python, -c CODE | SCRIPT, ...]`, and what tests use of a `subprocess.Popen` of it.

    The process has this one's standard output and error, unless `output` names a file for both.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        stdin: int | None = None,
        output: Path | None = None,
    ) -> None:
        assert stdin in (None, subprocess.DEVNULL)
        descriptors = {str(number): DupFd(number) for number in pass_fds}
        arguments = [str(word) for word in command[1:]]
        self._process = PROCESSES.Process(target=run, args=(arguments, dict(env), descriptors, output, Path.cwd()))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a warm Python", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and its server has yet to say so
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    arguments: list[str], environment: dict[str, str], descriptors: dict[str, Any], output: Path | None, folder: Path
) -> None:
    """Become the process: its environment, path, folder and arguments, then its program.

    An argument that is the number of an open file becomes the number that the file has here.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if output is not None:
        number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(number, 1)
        os.dup2(number, 2)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    arguments = [
        str(descriptors[word].detach()) if word in descriptors else word for word in arguments if word != "-P"
    ]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
