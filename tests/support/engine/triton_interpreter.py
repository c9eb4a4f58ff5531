"""Running a script with Triton kernels under Triton's interpreter, on the CPU."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from warm_python import WarmPython


def run_interpreted(script: str, *folders: Path, seconds: float = 600) -> None:
    """Run `script`, which ends by printing "all held"; skips where Triton is not installed.

    The script can import from `tests/support` and from `folders`.
    It runs in a process of its own, because Triton decides when a kernel is defined whether to interpret it.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here; its kernels are not tested")
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output"
        process = WarmPython([sys.executable, "-c", script], env=environment, output=output)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"not ended within {seconds} s"
        finally:
            process.kill()
        text = output.read_text()
    assert code == 0 and "all held" in text, f"{code}: {text[-2000:]}"


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
