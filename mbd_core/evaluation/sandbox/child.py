"""The process inside the sandbox: it runs a model's program, or tests that call one. `processes.py` starts it.

    python -I -S child.py ROLE MODULES ORDER_FD IN_FD OUT_FD VERDICT_FD

`answer`: defines the program and calls its function, with the order's inputs or with the inputs that come on IN_FD.
Only the results leave the process, on OUT_FD, as plain data; the right results never enter it. So whatever the program
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
        _limit(kind, value)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def confine(walls: dict[str, Any]) -> None:
    """Give up rights for good: become a user of its own if the grader is root, and limit threads. Without bubblewrap
    also enter namespaces, as far as the machine gives them, Landlock, and the filter of system calls. Raises
    `OSError`."""
    strict = walls["filter"] is not None
    user, has_namespaces = walls["user"], walls["apart"]
    if strict:
        has_namespaces = _leave_namespaces(user is not None) or has_namespaces
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    if strict:
        _keep_capabilities(READ_ANY if user is not None else 0)
    _limit(resource.RLIMIT_NPROC, walls["threads"] + (0 if has_namespaces or user is not None else walls["tasks"]))
    if strict:
        _enter_walls(walls["files"], walls["folders"], walls["filter"], landlock=walls["landlock"])


READ_ANY = 1 << 2  # CAP_DAC_READ_SEARCH: Python may lie in root's home; Landlock says which files those are
NO_NEW_PRIVS, SECCOMP, KEEP_CAPABILITIES, DUMPABLE = 38, 22, 8, 4  # of prctl
NEW_USER, NEW_NETWORK, NEW_IPC = 0x10000000, 0x40000000, 0x08000000  # of unshare


def _libc() -> Any:
    import ctypes  # 3 ms, which a process in bubblewrap does without

    return ctypes.CDLL(None, use_errno=True)


def _leave_namespaces(has_user: bool) -> bool:
    """Enter own network and IPC namespaces if the machine allows it. Returns whether the user's processes are counted
    anew."""
    if has_user:
        _libc().unshare(NEW_NETWORK | NEW_IPC)
        _libc().prctl(KEEP_CAPABILITIES, 1, 0, 0, 0)
        return False
    return bool(_libc().unshare(NEW_USER | NEW_NETWORK | NEW_IPC) == 0)


def _keep_capabilities(mask: int) -> None:
    import ctypes

    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if _libc().capset(header, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)):
        raise OSError(ctypes.get_errno(), "the capabilities cannot be dropped")


def _enter_walls(files: list[str], folders: list[str], program: bytes, *, landlock: int) -> None:
    """Enter Landlock, if the kernel has it, and the filter of system calls. Readable are `files` with everything below
    them, and the names in `folders`."""
    import ctypes

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    libc = _libc()
    libc.prctl(DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS was refused")
    if landlock:
        rules = ctypes.c_int(libc.syscall(LANDLOCK_CREATE, *_ruleset(landlock), 0)).value
        for paths, rights in ((files, READ_FILE | READ_FOLDER), (folders, READ_FOLDER)):
            for path in paths:
                _allow_below(libc, rules, path, rights)
        if rules < 0 or libc.syscall(LANDLOCK_RESTRICT, rules, 0):
            raise OSError(ctypes.get_errno(), "Landlock was refused")
        os.close(rules)
    content = Filter(len(program) // 8, program)
    if libc.prctl(SECCOMP, 2, ctypes.byref(content)):
        raise OSError(ctypes.get_errno(), "the filter of system calls was refused")


LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3


def _ruleset(version: int) -> tuple[bytes, int]:
    """struct landlock_ruleset_attr with everything that a version knows (files; from 4 on TCP; from 6 on sockets and
    signals of other processes), and its size."""
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    words = [(1 << rights) - 1] + [3] * (version >= 4) + [3] * (version >= 6)
    return b"".join(word.to_bytes(8, sys.byteorder) for word in words), 8 * len(words)


def _allow_below(libc: Any, rules: int, path: str, rights: int) -> None:
    import ctypes
    import stat

    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= READ_FILE
        rule = rights.to_bytes(8, sys.byteorder) + parent.to_bytes(4, sys.byteorder)
        if libc.syscall(LANDLOCK_ADD, rules, 1, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock took no rule for {path}")
    finally:
        os.close(parent)


def read_exactly(fd: int, length: int) -> bytes:
    """Exactly this number of bytes. Raises `EOFError` if fewer come."""
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
    from mbd_core.evaluation.sandbox.plain_data import encode

    write, clock, convert = os.write, time.monotonic, CONVERSIONS[order["convert"]]

    def send(kind: str, text: str) -> None:
        view = memoryview(f"{kind}{text}\n".encode())
        while view:
            view = view[write(answers_fd, view) :]

    try:
        reader = standard_streams() if order["convert"] == "printed" else None
        function = define(order["program"], "candidate")[order["entry_point"]]
        function = reader(function) if reader else function
    except BaseException as error:
        return send("!", type(error).__name__)
    send("=", "")
    calls = _calls(calls_fd) if order["inputs"] is None else ((inputs, {}) for inputs in order["inputs"])
    for arguments, keywords in calls:
        try:
            start = clock()
            out = function(*arguments, **keywords)
            seconds = clock() - start
            line = encode(convert(out), seconds)
        except BaseException as error:
            send("!", type(error).__name__)
        else:
            send("=", line)
    return None


def _as_set(out: Any) -> Any:
    return out if isinstance(out, (list, tuple, set, frozenset, dict, str, bool)) else set(out)


def standard_streams() -> Callable[[Callable[[], Any]], Callable[[str], str]]:
    """Put standard streams in place, the same for all inputs, because a program may import them by name. The returned
    function turns a function that reads and prints into a function from the input to the output.

    Each stream has a `buffer`; reading text and reading bytes move the same place in it. Neither stream has a file
    descriptor.
    """
    import builtins
    import contextlib
    import io

    class StreamBytes(io.BytesIO):
        def close(self) -> None:
            """Keep it open: the next input needs it, and its printed bytes are still to be read."""

        def read1(self, size: int | None = -1, /) -> bytes:
            """Reads a line at most, so that `stdin` leaves the later lines for readers of bytes."""
            return self.readline(size)

    class StreamText(io.TextIOWrapper):
        def close(self) -> None:
            """Keep it open, as `StreamBytes` does."""

    source, sink, files = StreamBytes(), StreamBytes(), open
    stdin = StreamText(source, encoding="utf-8", errors="surrogatepass", newline="\n")
    stdout = StreamText(sink, encoding="utf-8", errors="surrogatepass", newline="\n", write_through=True)

    def open_input(file: Any, mode: str = "r", *rest: Any, **keywords: Any) -> Any:
        if file == 0 or file == "/dev/stdin":
            return source if "b" in mode else stdin
        return files(file, mode, *rest, **keywords)

    builtins.open = open_input
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # which `site` defines elsewhere

    def printed(run: Callable[[], Any]) -> Callable[[str], str]:
        def output(text: str) -> str:
            sys.stdin, sys.stdout = stdin, stdout
            source.seek(0)
            source.truncate()
            source.write(text.encode("utf-8", "surrogatepass"))
            stdin.seek(0)
            sink.seek(0)
            sink.truncate()
            with contextlib.suppress(SystemExit):
                run()
            _wait_for_threads()
            with contextlib.suppress(Exception):
                sys.stdout.flush()  # the program may have put a text stream of its own around `sink`
            return sink.getvalue().decode("utf-8", "replace")

        return output

    sys.stdin, sys.stdout = stdin, stdout
    return printed


def _wait_for_threads() -> None:
    """Wait for the program's threads, as Python does at its end."""
    threading = sys.modules.get("threading")
    if threading is not None:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()


# The sent form of a value: itself; the set of its items; whether there is one; the text that the function printed
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda out: out,
    "set": _as_set,
    "given": lambda out: out if isinstance(out, bool) else out is not None,
    "printed": lambda out: out,
}


def _calls(fd: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    while True:
        try:
            yield read_framed(fd)
        except EOFError:
            return


def test(order: dict[str, Any], answers_fd: int, calls_fd: int, verdict_fd: int) -> None:
    """Run the tests and send the verdict: `passed`, `wrong` or `error`, and the detail.

    The first assertion that fails decides, and its verdict is sent at once. Later top-level assertions, in the tests
    or in their function `check`, run too. A second line says which failed, how many ran, and how many there are.
    """
    failures: list[int] = []
    num_run = 0

    def run_assertion(number: int, error: BaseException | None) -> None:
        nonlocal num_run
        if isinstance(error, EOFError):
            raise error  # the program is gone
        num_run = number + 1
        if error is not None:
            if not failures:
                send(_failure(error))
            failures.append(number)

    def send(line: str) -> None:
        write_all(verdict_fd, f"{line}\n".encode())

    num_assertions = 0
    verdict = "passed "
    try:
        function = stand_in(order["entry_point"], calls_fd, answers_fd)
        space: dict[str, Any] = (
            define(order["preamble"], "candidate") if order["preamble"] else {"__name__": "candidate"}
        )
        space[order["entry_point"]] = function
        tests, num_assertions = _counted_assertions(order["tests"], order["check"])
        space[RUN_ASSERTION] = run_assertion
        exec(tests, space)
        if order["check"]:
            space[order["check"]](function)
    except BaseException as error:  # what a test raises on a wrong type is the program's fault, as in the original
        verdict = _failure(error)
    send(f"{','.join(map(str, failures))} {num_run} {num_assertions}" if failures else verdict)


RUN_ASSERTION = "__run_assertion__"


def _failure(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return "wrong a test's assertion failed"
    if isinstance(error, EOFError):
        return f"error {PROGRAM_ENDED}"
    return f"error {error if isinstance(error, AnswerError) else type(error).__name__}"


def _counted_assertions(source: str, check: str) -> tuple[Any, int]:
    """The tests' code, whose assertions report to `RUN_ASSERTION` instead of ending them, and how many there are.

    Only top-level assertions count, in the tests or in the function `check`. An assertion inside another statement
    ends the tests.
    """
    import ast

    tree, count = ast.parse(source), 0
    bodies = [tree.body, *(n.body for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == check)]
    for body in bodies:
        for place, node in enumerate(body):
            if isinstance(node, ast.Assert):
                (guard,) = ast.parse(
                    f"try:\n    pass\nexcept BaseException as {RUN_ASSERTION}_error:\n"
                    f"    {RUN_ASSERTION}({count}, {RUN_ASSERTION}_error)\nelse:\n    {RUN_ASSERTION}({count}, None)\n"
                ).body
                assert isinstance(guard, ast.Try)
                guard.body = [node]
                body[place] = guard
                count += 1
    return compile(ast.fix_missing_locations(tree), "<tests>", "exec"), count


class AnswerError(Exception):
    """The program's function raised an exception, which the message names, or a value is no plain data."""


def stand_in(name: str, calls_fd: int, results_fd: int) -> Callable[..., Any]:
    """A function that asks the program's process."""
    from mbd_core.evaluation.sandbox.plain_data import decode

    results = os.fdopen(results_fd, "rb")

    def line() -> bytes:
        content = results.readline(LONGEST_LINE)
        if not content.endswith(b"\n"):
            raise EOFError
        if content.startswith(b"!"):
            raise AnswerError(content[1:].decode(errors="replace").strip())
        return content[1:]

    definitions: list[bool] = []

    def ask(*arguments: Any, **keywords: Any) -> Any:
        if not definitions:
            line()
            definitions.append(True)
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
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null_fd, fd)
    import ast  # noqa: F401  (before its file is out of reach, as the next)

    from mbd_core.evaluation.sandbox import plain_data  # noqa: F401

    limit_resources(order)
    if order["walls"] is not None:
        confine(order["walls"])
    try:
        (answer if role == "answer" else test)(order, *channels)
    finally:
        exit_now(0)


if __name__ == "__main__":
    main()
