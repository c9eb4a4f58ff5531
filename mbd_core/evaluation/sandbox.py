"""Runs a candidate program against tests in its own process, with limits on time and memory.

A pass is a verdict that the child writes after `check` returned, signed with a random marker of this run. So a
candidate that exits, prints "passed" or kills itself fails. The limits contain accidents, not malice: a program can
still read files, open sockets and search the interpreter's frames for the marker. Use a container to sweep models that
you do not trust.
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
    """The limits of one candidate: wall seconds, whole CPU seconds, address space and largest file in bytes."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a run; `detail` is for people (the exception's name, the exit status)."""

    reason: Reason
    detail: str = ""


def run_tests(program: str, *, test: str, entry_point: str, limits: Limits) -> Verdict:
    """Run `program`, then `test`, then `check(entry_point)`, in `python -I`, a minimal environment and a new folder.

    The candidate gets no stdin and its output is discarded. Its process group is killed at the end in every case.
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
        content = result.read(VERDICT_BYTES + 1)
    return _read_verdict(content, marker=marker, returncode=child.returncode)


def _end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all processes of the group have ended
    finally:
        child.wait()


def _read_verdict(content: bytes, *, marker: str, returncode: int) -> Verdict:
    try:
        verdict = json.loads(content)
    except ValueError:  # empty, or written by the candidate
        verdict = None
    if isinstance(verdict, dict) and verdict.get("marker") == marker:
        return Verdict(reason=verdict["reason"], detail=verdict["detail"])
    if returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Verdict(reason="timeout", detail="over its CPU time")
    return Verdict(reason="error", detail=f"the process ended early with status {returncode}")
