"""Run a command that never outlives the process that asked for it: `supervisor.py DRIVER_PID FOLDER COMMAND ...`.

The command and all its descendants are killed in three cases: on SIGTERM, when the command ends, and when the parent
process (`DRIVER_PID`) is gone, however it ended. In the last case `FOLDER` is removed too. On Linux the supervisor
adopts orphans (`PR_SET_CHILD_SUBREAPER`), so that each process that came of the command stays its descendant, also in
a session of its own; elsewhere an orphan escapes it.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_SECONDS = 0.2


def supervise(driver: int, folder: Path, command: list[str]) -> int:
    """The command's exit code, or minus the signal that ended it."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    end_with_me = None
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        # if the supervisor itself is killed, the command is asked to end
        end_with_me = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    head = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=end_with_me)
    while head.poll() is None and not signals and os.getppid() == driver:
        reap_orphans(head)
        time.sleep(POLL_SECONDS)
    end(head)
    if os.getppid() != driver:
        shutil.rmtree(folder, ignore_errors=True)
    return head.returncode


def end(head: "subprocess.Popen[bytes]") -> None:
    """Kill the command and its descendants, until there is none."""
    while processes := psutil.Process().children(recursive=True):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        head.poll()
        reap_orphans(head)
        time.sleep(0.02)


def reap_orphans(head: "subprocess.Popen[bytes]") -> None:
    """Collect the exit codes of adopted processes that have ended; the command's own is left for `head.poll()`."""
    with suppress(ChildProcessError):
        while orphan := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if orphan.si_pid == head.pid:
                return
            os.waitpid(orphan.si_pid, 0)


if __name__ == "__main__":
    sys.exit(supervise(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
