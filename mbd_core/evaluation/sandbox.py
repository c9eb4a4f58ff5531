"""Processes for programs that a model wrote: what they can reach, and what they can use up.

With bubblewrap (`bwrap`) a process has its own user, process, network, IPC and host-name namespaces, sees the system's
libraries and Python read-only and no other file, has a small throw-away folder, and a filter of system calls. Where
bubblewrap is absent or the machine forbids it, the filter is stricter: the process writes no file at all, starts no
program, and has its own user and network namespaces if the machine allows them; but it can read what its user can
read. Either way it can start no process, open no socket and send no signal, and its time, memory, files and output are
limited.
"""

import functools
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy

from mbd_core.evaluation import plain_data, sandbox_child
from mbd_core.evaluation.seccomp_filter import filter_program

Isolation = Literal["bubblewrap", "filter", "limits"]
Role = Literal["answer", "test"]
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
FOLDER_BYTES = 16 << 20
PROBE_SECONDS = 20
PATIENCE = 4
MEANING: dict[str, str] = {
    "bubblewrap": "bubblewrap: own namespaces, no files but Python's, no network, a filter of system calls",
    "filter": "a filter of system calls without bubblewrap: no writes, no network, no processes; files can be read",
    "limits": "limits on time and memory only: run programs that you do not trust elsewhere",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one process: wall seconds, whole CPU seconds, address space and largest file in bytes."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 2 << 30
    file_bytes: int = 1 << 20


class Contained:
    """A running process of the sandbox, whose lines are read as they come."""

    def __init__(self, process: subprocess.Popen[bytes], lines_fd: int) -> None:
        self._process = process
        self._fd = lines_fd
        self._buffer = bytearray()
        self._innermost: int | None = None  # known once it has sent a line

    def read_line(self, *, seconds: float, longest: int) -> bytes | None:
        """The next line without its end, `None` when there is none any more.

        Raises `OverflowError` if it is longer than `longest` bytes, and `TimeoutError` if the process computes longer
        than `seconds`. On a busy machine that is more wall time: up to `PATIENCE` times as much, idle time included.
        """
        started, used = time.monotonic(), self._cpu_seconds()
        deadline = started + seconds
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > longest:
                raise OverflowError
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                rest = seconds - (self._cpu_seconds() - used)
                now = time.monotonic()
                if rest <= 0 or now >= started + PATIENCE * seconds:
                    raise TimeoutError
                deadline = min(now + max(rest, 0.01), started + PATIENCE * seconds)
                continue
            part = os.read(self._fd, 1 << 20)
            if not part:
                return None
            self._buffer += part
        if end > longest:
            raise OverflowError
        if self._innermost is None:
            self._innermost = _innermost(self._process.pid)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _cpu_seconds(self) -> float:
        """What the innermost process has computed; wall time where the machine does not say."""
        if self._innermost is None:
            return time.monotonic()
        try:
            return int(Path(f"/proc/{self._innermost}/schedstat").read_bytes().split()[0]) / 1e9
        except (OSError, ValueError, IndexError):
            return time.monotonic()

    def wait_briefly(self) -> int:
        """Its exit status as `end` gives it, after a moment in which it may end by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        return self.end()

    def end(self) -> int:
        """Kill what is left of it; its exit status, negative for a signal."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        return 128 - status if status > 128 else status


def _innermost(pid: int) -> int:
    """The last process in a chain of single children: bubblewrap runs a program in its grandchild."""
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return pid
        if len(children) != 1:
            return pid
        pid = int(children[0])


@contextmanager
def contained(
    role: Role,
    order: Mapping[str, Any],
    limits: Limits,
    *,
    input_fd: int | None = None,
    output_fd: int | None = None,
    isolation: Isolation | None = None,
) -> Iterator[Contained]:
    """A process of `sandbox_child.py`, which is killed at the end of the body.

    Its lines are those of the program's answers, or, where `output_fd` takes these, of the verdict.
    """
    chosen = isolation or available_isolation()
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as orders, tempfile.TemporaryFile() as rules:
        packages = ["/packages"] if chosen == "bubblewrap" else [str(Path(numpy.__file__).parents[1])]
        strict = filter_program(read_only=True) if chosen == "filter" else None
        limited = {name: getattr(limits, name) for name in ("cpu_seconds", "memory_bytes", "file_bytes")}
        _fill(orders, sandbox_child.frame({**order, **limited, "filter": strict, "packages": packages}))
        _fill(rules, filter_program(read_only=False) or b"")
        channels = [input_fd, write_fd, None] if output_fd is None else [input_fd, output_fd, write_fd]
        inherited = [fd for fd in (orders.fileno(), *channels) if fd is not None]
        arguments = [role, *_numbers(orders.fileno(), *channels)]
        try:
            process = _start(chosen, arguments, inherited, rules)
        finally:
            os.close(write_fd)
    running = Contained(process, read_fd)
    try:
        yield running
    finally:
        running.end()
        os.close(read_fd)


def _numbers(*descriptors: int | None) -> list[str]:
    return [str(-1 if fd is None else fd) for fd in descriptors]


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _start(
    isolation: Isolation, arguments: Sequence[str], inherited: Sequence[int], rules: IO[bytes]
) -> subprocess.Popen[bytes]:
    python = [str(interpreter()), "-I", "-S"]
    if isolation == "bubblewrap":
        wrap = [*bubblewrap_command(), "--seccomp", str(rules.fileno()), "--"]
        command = [*wrap, *python, "/modules/mbd_core/evaluation/sandbox_child.py", arguments[0], "/modules"]
        inherited = [*inherited, rules.fileno()]
    else:
        child = Path(sandbox_child.__file__)
        command = [*python, str(child), arguments[0], str(child.parents[2])]
    return subprocess.Popen(
        [*command, *arguments[1:]],
        cwd="/",
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=inherited,
        start_new_session=True,
    )


def interpreter() -> Path:
    """This Python's own program, not that of a virtual environment."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


@functools.cache
def bubblewrap_command() -> tuple[str, ...]:
    """`bwrap` with a view of the C library, Python, numpy, and two files of ours."""
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for folder in ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        elif os.path.exists(folder):
            command += ["--ro-bind", folder, folder]
    prefix = str(Path(sys.base_prefix).resolve())
    if not prefix.startswith("/usr"):
        command += ["--ro-bind", prefix, prefix]
    site = Path(numpy.__file__).parents[1]
    for folder in ("numpy", "numpy.libs"):
        if (site / folder).is_dir():
            command += ["--ro-bind", str(site / folder), f"/packages/{folder}"]
    for module in (plain_data, sandbox_child):
        assert module.__file__ is not None
        command += ["--ro-bind", module.__file__, f"/modules/mbd_core/evaluation/{Path(module.__file__).name}"]
    for device in ("/dev/null", "/dev/zero", "/dev/urandom"):
        command += ["--dev-bind", device, device]
    command += ["--proc", "/proc", "--size", str(FOLDER_BYTES), "--tmpfs", "/tmp"]
    return (*command, "--chdir", "/tmp", "--remount-ro", "/", "--cap-drop", "ALL")


@functools.cache
def available_isolation() -> Isolation:
    """The strictest isolation that this machine allows, tried once."""
    if platform.system() != "Linux":
        return "limits"
    rules = filter_program(read_only=True)
    if rules is not None and shutil.which("bwrap") and _works("bubblewrap"):
        return "bubblewrap"
    return "filter" if rules is not None and _works("filter") else "limits"


def _works(isolation: Isolation) -> bool:
    order = {"program": "def f():\n    return 1\n", "entry_point": "f", "inputs": [[]], "convert": ""}
    with contained("answer", order, Limits(), isolation=isolation) as process:
        try:
            lines = [process.read_line(seconds=PROBE_SECONDS, longest=1000) for _ in range(2)]
        except (TimeoutError, OverflowError):
            return False
    return lines[0] == b"=" and (lines[1] or b"").startswith(b'=["int",1,')
