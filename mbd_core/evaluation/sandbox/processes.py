"""Processes for programs that a model wrote: their reach, and their limits.

With bubblewrap (`bwrap`) a process has its own namespaces (no other process, no network), sees the system's libraries
and Python read-only and no other file, not even `/proc`, and has a small throw-away folder. If bubblewrap is absent or
forbidden by the machine, the process writes no file and starts no program, and Landlock, if the kernel has it, lets it
read only the same files. In both cases it has no capability, and a filter of system calls lets it start no process,
open no socket and send no signal. Its time, memory, threads, files and output are limited. If the grader is root, each
program runs as a separate user.
"""

import ctypes
import functools
import itertools
import os
import platform
import re
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

from mbd_core.evaluation.sandbox import child as sandbox_child
from mbd_core.evaluation.sandbox import plain_data
from mbd_core.evaluation.sandbox.system_calls import filter_program

Isolation = Literal["bubblewrap", "landlock", "filter", "limits"]
Walls = Literal["any", "required"]
Role = Literal["answer", "test"]
ENVIRONMENT = {"PATH": os.defpath, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
FOLDER_BYTES = 16 << 20
PROBE_SECONDS = 20
PATIENCE = 4
BRIEFLY = 0.05
THREADS = 64
SPARE_USERS = 1 << 14
ALL_NEW = ["--unshare-all"]
LIBRARIES = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
ISOLATED: tuple[Isolation, ...] = ("bubblewrap", "landlock")  # with these the right results cannot be read
MEANING: dict[str, str] = {
    "bubblewrap": "bubblewrap: own namespaces, no files but Python's, no network, a filter of system calls",
    "landlock": "Landlock and a filter of system calls: no files but Python's, no writes, no network, no processes",
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
        self._started = time.monotonic()
        self._chain: list[int] = []  # ids of its processes, known once a line has come

    def read_line(self, *, seconds: float, longest: int, others: Sequence["Contained"] = ()) -> bytes | None:
        """The next line without its end; `None` after the last line.

        Raises `OverflowError` if the line is longer than `longest` bytes. Raises `TimeoutError` if the process, and
        the `others` that it waits for, take more than `seconds` for the line. Waits for a busy processor are not in
        these seconds; with such waits the line may take `PATIENCE` times as long. So a busy machine fails no right
        program, and a program that sleeps holds its place no longer than on a free machine.
        """
        start = time.monotonic()
        usage_before = ProcessorUse() if b"\n" in self._buffer else self._usage(others)
        deadline = start + seconds
        search_start = 0
        while (end := self._buffer.find(b"\n", search_start)) < 0:
            search_start = len(self._buffer)
            if search_start > longest:
                raise OverflowError
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                now, usage = time.monotonic(), self._usage(others)
                seconds_left = seconds - usage.own_seconds(now - start, usage_before)
                if seconds_left <= 0 or now >= start + PATIENCE * seconds:
                    raise TimeoutError
                pause = BRIEFLY if usage.ready else max(seconds_left, 0.01)
                deadline = min(now + pause, start + PATIENCE * seconds)
                continue
            part = os.read(self._fd, 1 << 20)
            if not part:
                return None
            self._buffer += part
        if end > longest:
            raise OverflowError
        self._chain = self._chain or _chain(self._process.pid)
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def left_of(self, seconds: float) -> float:
        """How many of `seconds`, counted from the process's start, are left, by the rule of `read_line`."""
        age = time.monotonic() - self._started
        return min(seconds - (age - self._usage(()).delayed), PATIENCE * seconds - age)

    def _usage(self, others: Sequence["Contained"]) -> "ProcessorUse":
        pids = [pid for process in (self, *others) for pid in process._chain or _chain(process._process.pid)]
        uses = [_usage(pid) for pid in pids]
        ready = any(use.ready for use in uses)
        return ProcessorUse(sum(use.computed for use in uses), sum(use.delayed for use in uses), ready)

    def wait_briefly(self) -> int:
        """End the process after a moment in which it may end by itself. Returns the exit status, as `end` does."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        return self.end()

    def end(self) -> int:
        """Kill the process and its children. Returns the exit status, negative for a signal."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        return 128 - status if status > 128 else status


@dataclass(frozen=True)
class ProcessorUse:
    """The seconds that a process computed, the seconds that it waited for the processor, and whether it computes or
    waits at the moment: the kernel counts a wait only when it ends."""

    computed: float = 0.0
    delayed: float = 0.0
    ready: bool = False

    def own_seconds(self, elapsed: float, start: "ProcessorUse") -> float:
        """The seconds since `start` in which the process computed or was idle."""
        if self.ready:
            return self.computed - start.computed
        return elapsed - (self.delayed - start.delayed)


def _usage(pid: int) -> ProcessorUse:
    """The use of the processor; zero if the machine does not report it, so all wall time is the process's own."""
    try:
        computed, delayed = Path(f"/proc/{pid}/schedstat").read_bytes().split()[:2]
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, ValueError, IndexError):
        return ProcessorUse()
    return ProcessorUse(int(computed) / 1e9, int(delayed) / 1e9, state == b"R")


def _chain(pid: int) -> list[int]:
    """A process, its only child, that child's only child, and so on: bubblewrap runs a program in its grandchild."""
    chain = [pid]
    while True:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return chain
        if len(children) != 1:
            return chain
        pid = int(children[0])
        chain.append(pid)


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
    """A process of `child.py`, which is killed at the end of the body.

    Its lines are the program's answers, or, if `output_fd` takes the answers, the verdict.
    """
    walls = isolation or available_isolation()
    with _contained_process(role, order, limits, input_fd, output_fd, walls, own_user=has_own_user(walls)) as process:
        yield process


@contextmanager
def _contained_process(
    role: Role,
    order: Mapping[str, Any],
    limits: Limits,
    input_fd: int | None,
    output_fd: int | None,
    isolation: Isolation,
    *,
    own_user: bool,
) -> Iterator[Contained]:
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryFile() as orders, tempfile.TemporaryFile() as rules:
        packages = "/packages" if isolation == "bubblewrap" else str(_site())
        limit_values = {name: getattr(limits, name) for name in ("cpu_seconds", "memory_bytes", "file_bytes")}
        walls = _walls(isolation, own_user=own_user)
        _fill(orders, sandbox_child.frame({**order, **limit_values, "packages": [packages], "walls": walls}))
        threads = own_user or os.geteuid() != 0  # root's threads have no limit
        _fill(rules, filter_program(read_only=False, threads=threads) or b"")
        channels = [input_fd, write_fd, None] if output_fd is None else [input_fd, output_fd, write_fd]
        descriptors = [fd for fd in (orders.fileno(), *channels) if fd is not None]
        arguments = [role, *_numbers(orders.fileno(), *channels)]
        try:
            process = _start(isolation, arguments, descriptors, rules, own_user=own_user)
        finally:
            os.close(write_fd)
    contained_process = Contained(process, read_fd)
    try:
        yield contained_process
    finally:
        contained_process.end()
        os.close(read_fd)


def _walls(isolation: Isolation, *, own_user: bool) -> dict[str, Any] | None:
    """The settings with which the process confines itself before it runs the program (`child.confine`)."""
    if isolation == "limits":
        return None
    strict = isolation != "bubblewrap"
    root = os.geteuid() == 0
    return {
        "user": _spare_user() if own_user else None,
        "threads": THREADS,
        "apart": not strict and _counts_by_namespace(),
        "tasks": 0 if root or (not strict and _counts_by_namespace()) else _tasks_of_user(),
        "filter": filter_program(read_only=True, threads=own_user or not root) if strict else None,
        "landlock": landlock_version() if isolation == "landlock" else 0,
        "files": [str(path) for path in (*_read_files(), *_package_folders(), *DEVICES)],
        "folders": [str(_site())],
    }


def _numbers(*descriptors: int | None) -> list[str]:
    return [str(-1 if fd is None else fd) for fd in descriptors]


def _fill(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)


def _start(
    isolation: Isolation, arguments: Sequence[str], inherited: Sequence[int], rules: IO[bytes], *, own_user: bool
) -> subprocess.Popen[bytes]:
    python = [str(interpreter()), "-I", "-S"]
    if isolation == "bubblewrap":
        wrap = [*bubblewrap_command(own_user=own_user), "--seccomp", str(rules.fileno()), "--"]
        command = [*wrap, *python, "/modules/mbd_core/evaluation/sandbox/child.py", arguments[0], "/modules"]
        inherited = [*inherited, rules.fileno()]
    else:
        child = Path(sandbox_child.__file__)
        command = [*python, str(child), arguments[0], str(child.parents[3])]
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
    """This Python's own program, not a virtual environment's."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def _site() -> Path:
    return Path(numpy.__file__).parents[1]


def _package_folders() -> list[Path]:
    return [_site() / name for name in ("numpy", "numpy.libs") if (_site() / name).is_dir()]


def _read_files() -> list[Path]:
    """The C library and Python."""
    prefix = Path(sys.base_prefix).resolve()
    python_folders = [] if prefix.is_relative_to("/usr") else [prefix]
    return [*(Path(name) for name in LIBRARIES if os.path.exists(name)), *python_folders]


@functools.cache
def bubblewrap_command(*, own_user: bool) -> tuple[str, ...]:
    """`bwrap` with a view of the C library, Python, numpy, and two files of ours.

    With `own_user`, root makes the namespaces, and the process may change its user, which it does before the program.
    """
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--clearenv"]
    command += [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")] if own_user else ALL_NEW
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    modules = Path("/modules/mbd_core/evaluation/sandbox")
    bindings = [(path, path) for path in _read_files()]
    bindings += [(path, Path("/packages", path.name)) for path in _package_folders()]
    bindings += [(Path(name), modules / Path(name).name) for name in (plain_data.__file__, sandbox_child.__file__)]
    parents = {folder for path in (*(path for _, path in bindings), *map(Path, DEVICES)) for folder in path.parents}
    for folder in sorted(parents):
        command += ["--dir", str(folder)]  # folders that bubblewrap makes by itself are open to root only
    for source, path in bindings:
        if source.is_symlink():
            command += ["--symlink", os.readlink(source), str(path)]
        else:
            command += ["--ro-bind", str(source), str(path)]
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    command += ["--perms", "1777", "--size", str(FOLDER_BYTES), "--tmpfs", "/tmp"]
    capabilities = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if own_user else []
    return (*command, "--chdir", "/tmp", "--remount-ro", "/", "--cap-drop", "ALL", *capabilities)


@functools.cache
def available_isolation() -> Isolation:
    """The strictest isolation that this machine allows, tried once."""
    if platform.system() != "Linux" or filter_program(read_only=True) is None:
        return "limits"
    strict: tuple[Isolation, ...] = ("bubblewrap", "landlock", "filter")
    return next((name for name in strict if _is_allowed(name)), "limits")


def describe_isolation(walls: Walls = "any") -> str:
    """How this machine contains programs, in words. Raises `ValueError` if `walls` requires more than it has."""
    isolation = available_isolation()
    if walls == "required" and isolation not in ISOLATED:
        raise ValueError(
            f"--isolation required: this machine has neither bubblewrap nor Landlock: programs would run under "
            f"{MEANING[isolation]}; install bubblewrap, or grade where the kernel has Landlock (Linux 5.13)"
        )
    user_text = ", each a user of its own" if has_own_user(isolation) else ""
    return (
        f"{MEANING[isolation]}; at most {THREADS} threads{user_text}" if isolation != "limits" else MEANING[isolation]
    )


def hide_memory() -> None:
    """Hide this process's memory from other processes of its user, for good. Only the isolation `filter` needs this:
    bubblewrap and Landlock keep programs away from the memory."""
    if available_isolation() == "filter":
        ctypes.CDLL(None).prctl(sandbox_child.DUMPABLE, 0, 0, 0, 0)


def _is_allowed(isolation: Isolation) -> bool:
    availability = {"bubblewrap": bool(shutil.which("bwrap")), "landlock": landlock_version() > 0}
    return availability.get(isolation, True) and (has_own_user(isolation) or _works(isolation, own_user=False))


@functools.cache
def has_own_user(isolation: Isolation) -> bool:
    """Whether each program can run as a separate user: if the grader is root and may change its user."""
    return isolation != "limits" and os.geteuid() == 0 and _last_user() > 0 and _works(isolation, own_user=True)


def _works(isolation: Isolation, *, own_user: bool) -> bool:
    program = "import json, numpy\ndef f():\n    return 1\n"  # the program's user must be able to read their files
    order = {"program": program, "entry_point": "f", "inputs": [[]], "convert": ""}
    with _contained_process("answer", order, Limits(), None, None, isolation, own_user=own_user) as process:
        try:
            lines = [process.read_line(seconds=PROBE_SECONDS, longest=1000) for _ in range(2)]
        except (TimeoutError, OverflowError):
            return False
    return lines[0] == b"=" and (lines[1] or b"").startswith(b'=["int",1,')


@functools.cache
def landlock_version() -> int:
    """The kernel's version of Landlock, 0 without it."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(sandbox_child.LANDLOCK_CREATE, None, 0, 1)))


_runs = itertools.count(os.getpid())


def _spare_user() -> int:
    """A user id that no running program has, from the end of the machine's range. It owns nothing, and its threads are
    counted apart."""
    return _last_user() - next(_runs) % SPARE_USERS


@functools.cache
def _last_user() -> int:
    """The last user id before `nobody` that may be given to a process; 0 if there is none."""
    try:
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().split("\n")[0].split())
    except (OSError, ValueError):
        return 0
    return max(0, first + count - 3) if count > 2 * SPARE_USERS else 0


def _counts_by_namespace() -> bool:
    """Whether a user's threads are counted anew in a user namespace: from Linux 5.14."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(re.match(r"\d*", minor)[0] or 0)) >= (5, 14)  # type: ignore[index]


def _tasks_of_user() -> int:
    """The threads that this process's user has on the machine."""
    count = 0
    for folder in os.scandir("/proc"):
        if folder.name.isdecimal():
            with suppress(OSError):
                if folder.stat().st_uid == os.geteuid():
                    count += len(os.listdir(f"{folder.path}/task"))
    return count
