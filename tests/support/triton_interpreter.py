"""Running a script with Triton kernels under Triton's interpreter, on the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_interpreted(script: str, *folders: Path) -> None:
    """Run `script`, which ends by printing "all held"; skips where Triton is not installed.

    The script can import from `tests/support` and from `folders`.
    It runs in a process of its own, because Triton decides when a kernel is defined whether to interpret it.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed here; its kernels are not tested")
    paths = [str(Path(__file__).parent), *map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "all held" in done.stdout, done.stderr[-2000:]
