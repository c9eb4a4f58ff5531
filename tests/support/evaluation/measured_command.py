"""A command's seconds and the most memory that it had, whatever the process that starts it has."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

START = (
    "import os, subprocess, sys\n"
    "process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
    "_, status, usage = os.wait4(process.pid, 0)\n"
    "print(status, usage.ru_maxrss)\n"
)
"""A small process between this one and the command: the kernel counts as a child's what its parent had at `exec`."""


@dataclass(frozen=True)
class Measured:
    """`status` is that of `os.wait4`, 0 for success."""

    status: int
    seconds: float
    most_bytes: int


def measure(command: Sequence[str]) -> Measured:
    """Run a command to its end."""
    begun = time.monotonic()
    whole = subprocess.run([sys.executable, "-c", START, *command], stdout=subprocess.PIPE, text=True, check=True)
    status, kibibytes = map(int, whole.stdout.split())
    return Measured(status, time.monotonic() - begun, kibibytes * 1024)
