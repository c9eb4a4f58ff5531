"""Running a script with Triton kernels under Triton's interpreter, on the CPU."""

import contextlib
import importlib.util
import io
import multiprocessing
import os
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

INTERPRETED = {"TRITON_INTERPRET": "1"}
PROCESSES = multiprocessing.get_context("forkserver")
"""Scripts run in forks of a process that has imported torch and Triton, which takes longer than most of them."""
PROCESSES.set_forkserver_preload(["torch", "triton.language"])


def run_interpreted(script: str, *folders: Path, seconds: float = 120) -> None:
    """Run `script`, which ends by printing "all held"; skips where Triton is not installed.

    The script can import from `tests/support` and from `folders`.
    It runs in a process of its own, because Triton decides when a kernel is defined whether to interpret it.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here; its kernels are not tested")
    receiver, sender = PROCESSES.Pipe(duplex=False)
    paths = [*map(str, folders), *sys.path]
    with patch.dict(os.environ, INTERPRETED):
        process = PROCESSES.Process(target=run_here, args=(script, paths, sender))
        process.start()
    sender.close()
    try:
        assert receiver.poll(seconds), f"the script did not end within {seconds} s"
        printed = receiver.recv()
    finally:
        process.kill()
        process.join()
    assert printed.endswith("all held\n"), printed[-2000:]


def run_here(script: str, paths: list[str], sender: Connection) -> None:
    """Run the script in this process, and send what it printed or how it failed."""
    assert os.environ.items() >= INTERPRETED.items(), "Triton was imported to compile"
    sys.path[:] = paths
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(script, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc(file=printed)
    sender.send(printed.getvalue())


def allow_bfloat16_dots() -> None:
    """Inside a script: let the interpreter multiply bfloat16, which it holds as integers and multiplies as such."""
    import triton.language as tl
    from triton.runtime import interpreter

    def widened(builder: Any, handle: Any) -> Any:
        return builder.cast_impl(handle, tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return whole(self, widened(self, a), widened(self, b), d, *options)

    whole = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = create_dot
