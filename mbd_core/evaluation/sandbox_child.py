"""What runs inside the sandbox: a program that a model wrote, or tests that call one. Started by `sandbox.py`.

    python -I -S sandbox_child.py ROLE MODULES ORDER_FD IN_FD OUT_FD VERDICT_FD

`answer`: defines the program and calls its function, with the order's inputs or with those that come on IN_FD. Only
the results leave the process, on OUT_FD, as plain data; what they should be never enters it. So whatever the program
does to this process, it can send other data at most.
`test`: runs a benchmark's tests. The function that they call is a stand-in which asks the program's process: calls go
out on OUT_FD, answers come on IN_FD, and the verdict goes to VERDICT_FD.
"""

from __future__ import annotations

import marshal
import os
import resource
import sys
import time

TYPE_CHECKING = False  # `typing` itself costs a third of the start
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

HEADER = 8
LONGEST_LINE = 1 << 24
PROGRAM_ENDED = "the program ended"


def limit_resources(order: dict[str, Any]) -> None:
    """Set the limits for good. Over its CPU time a process gets SIGXCPU, and a second later SIGKILL."""
    seconds = order["cpu_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    for kind, value in (
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def enter_filter(program: bytes) -> None:
    """Own user and network namespaces where the machine allows them, and the filter of system calls for good."""
    import ctypes

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(0x10000000 | 0x40000000 | 0x08000000)  # CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWIPC
    content = Filter(len(program) // 8, program)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(content)):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


def read_exactly(fd: int, length: int) -> bytes:
    """So many bytes; `EOFError` if fewer come."""
    parts = []
    while length:
        part = os.read(fd, min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def read_framed(fd: int) -> Any:
    """The next value that a trusted process sent."""
    return marshal.loads(read_exactly(fd, int.from_bytes(read_exactly(fd, HEADER), "little")))


def write_all(fd: int, content: bytes) -> None:
    """Write all of it."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def frame(value: Any) -> bytes:
    """A value for `read_framed`."""
    content = marshal.dumps(value)
    return len(content).to_bytes(HEADER, "little") + content


def define(source: str, file_name: str) -> dict[str, Any]:
    """The names that a program defines, as a module that is imported."""
    module = type(sys)(file_name)
    sys.modules[file_name] = module
    exec(compile(source, f"<{file_name}>", "exec"), module.__dict__)
    return module.__dict__


def answer(order: dict[str, Any], calls_fd: int, answers_fd: int, _verdict_fd: int) -> None:
    """Send a line for the definition, and one for each call: its value, or the exception's name."""
    from mbd_core.evaluation.plain_data import encode

    write, clock, convert = os.write, time.monotonic, CONVERSIONS[order["convert"]]

    def send(kind: str, text: str) -> None:
        view = memoryview(f"{kind}{text}\n".encode())
        while view:
            view = view[write(answers_fd, view) :]

    try:
        function = define(order["program"], "candidate")[order["entry_point"]]
    except BaseException as error:
        return send("!", type(error).__name__)
    send("=", "")
    calls = _calls(calls_fd) if order["inputs"] is None else ((inputs, {}) for inputs in order["inputs"])
    for arguments, keywords in calls:
        try:
            started = clock()
            out = function(*arguments, **keywords)
            seconds = clock() - started
            line = encode(convert(out), seconds)
        except BaseException as error:
            send("!", type(error).__name__)
        else:
            send("=", line)
    return None


def _as_set(out: Any) -> Any:
    return out if isinstance(out, (list, tuple, set, frozenset, dict, str, bool)) else set(out)


# What is sent of a value: itself; the set of what it yields; whether there is one
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda out: out,
    "set": _as_set,
    "given": lambda out: out if isinstance(out, bool) else out is not None,
}


def _calls(fd: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    while True:
        try:
            yield read_framed(fd)
        except EOFError:
            return


def test(order: dict[str, Any], answers_fd: int, calls_fd: int, verdict_fd: int) -> None:
    """Run the tests and send the verdict: `passed`, `wrong` or `error`, and the detail."""
    try:
        function = stand_in(order["entry_point"], calls_fd, answers_fd)
        space: dict[str, Any] = (
            define(order["preamble"], "candidate") if order["preamble"] else {"__name__": "candidate"}
        )
        space[order["entry_point"]] = function
        exec(compile(order["tests"], "<tests>", "exec"), space)
        if order["check"]:
            space[order["check"]](function)
    except AssertionError:
        verdict = ("wrong", "a test's assertion failed")
    except EOFError:
        verdict = ("error", PROGRAM_ENDED)
    except BaseException as error:  # what a test raises on a wrong type is the program's fault, as in the original
        verdict = ("error", str(error) if isinstance(error, AnswerError) else type(error).__name__)
    else:
        verdict = ("passed", "")
    write_all(verdict_fd, f"{verdict[0]} {verdict[1]}\n".encode())


class AnswerError(Exception):
    """What the program's function raised, by name, or a value that is no plain data."""


def stand_in(name: str, calls_fd: int, results_fd: int) -> Callable[..., Any]:
    """A function that asks the program's process."""
    from mbd_core.evaluation.plain_data import decode

    results = os.fdopen(results_fd, "rb")

    def line() -> bytes:
        content = results.readline(LONGEST_LINE)
        if not content.endswith(b"\n"):
            raise EOFError
        if content.startswith(b"!"):
            raise AnswerError(content[1:].decode(errors="replace").strip())
        return content[1:]

    defined: list[bool] = []

    def ask(*arguments: Any, **keywords: Any) -> Any:
        if not defined:
            line()
            defined.append(True)
        try:
            write_all(calls_fd, frame((arguments, keywords)))
        except ValueError:
            raise AnswerError("a test hands over an object that is no plain data") from None
        except BrokenPipeError:
            raise EOFError from None
        try:
            return decode(line()).value
        except ValueError as error:
            raise AnswerError(str(error)) from None

    ask.__name__ = name
    return ask


def main() -> None:
    """Read the order, detach from everything else, run, and exit without the program's exit handlers."""
    role, modules = sys.argv[1:3]
    order_fd, *channels = map(int, sys.argv[3:])
    exit_now = os._exit  # the program may replace it
    order = read_framed(order_fd)
    os.close(order_fd)
    sys.path[:0] = [modules]
    sys.path += order["packages"]
    sys.dont_write_bytecode = True
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    limit_resources(order)
    if order["filter"]:
        enter_filter(order["filter"])
    try:
        (answer if role == "answer" else test)(order, *channels)
    finally:
        exit_now(0)


if __name__ == "__main__":
    main()
