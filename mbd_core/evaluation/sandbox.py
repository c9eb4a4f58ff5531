"""Running a candidate program against tests in a process of its own, with limits on time and memory.

A pass needs a verdict signed with a marker drawn for this run, written after `check` returned. So a candidate that
exits, prints "passed" or kills itself fails. These limits contain accidents, not malice: a program may still read
files and open sockets, and one that searches its interpreter's frames could find the marker. Run sweeps over
programs of models you do not trust in a container.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Reason = Literal["passed", "wrong", "error", "timeout", "memory"]
CHILD = Path(__file__).with_name("sandbox_child.py")
VERDICT_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one candidate may use: wall seconds, CPU seconds (whole), address space and largest file in bytes."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How a run ended; `detail` is for people (the exception's name, the exit status)."""

    reason: Reason
    detail: str = ""


def run_tests(program: str, *, test: str, entry_point: str, limits: Limits) -> Verdict:
    """Run `program`, then `test`, then `check(entry_point)`, in `python -I` with an empty environment and own folder.

    The child gets no stdin and its output is thrown away; its process group is killed at the end, whatever the end.
    """
    marker = secrets.token_hex(16)
    order = {
        "marker": marker,
        "program": program,
        "test": test,
        "entry_point": entry_point,
        "cpu_seconds": limits.cpu_seconds,
        "memory_bytes": limits.memory_bytes,
        "file_bytes": limits.file_bytes,
    }
    with tempfile.TemporaryDirectory(prefix="candidate-") as folder, tempfile.TemporaryFile() as result:
        child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD), str(result.fileno())],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(result.fileno(),),
            start_new_session=True,
        )
        try:
            child.communicate(json.dumps(order).encode(), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Verdict(reason="timeout", detail=f"over {limits.wall_seconds:g} s of wall time")
        finally:
            _end(child)
        result.seek(0)
        written = result.read(VERDICT_BYTES + 1)
    return _read_verdict(written, marker=marker, returncode=child.returncode)


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the whole group has ended already
    finally:
        child.wait()


def _read_verdict(written: bytes, *, marker: str, returncode: int) -> Verdict:
    try:
        verdict = json.loads(written)
    except ValueError:  # nothing there, or not what our child writes
        verdict = None
    if isinstance(verdict, dict) and verdict.get("marker") == marker:
        return Verdict(reason=verdict["reason"], detail=verdict["detail"])
    if returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict(reason="timeout", detail="over its CPU time")
    return Verdict(reason="error", detail=f"the process ended early with status {returncode}")
