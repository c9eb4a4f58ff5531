"""The supervisor: what it runs never outlives the process that asked for it, in whatever session it hides."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from session_processes import living_with

from cluster.local import SUPERVISOR

PATIENCE = 60.0

# A process that takes no SIGTERM and leaves its session and its parent behind, beside one that stays.
COMMAND = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork():
        os._exit(0)
os.write(1, b"up\\n")  # one write: print makes two where output is unbuffered, and the two processes mix them
time.sleep(600)
"""

DRIVER = """
import os, subprocess, sys, time
supervisor, folder, *command = sys.argv[1:]
subprocess.Popen([sys.executable, supervisor, str(os.getpid()), folder, *command], start_new_session=True)
time.sleep(600)
"""


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, "the awaited state was not reached"
        time.sleep(0.05)


def session_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "session"
    folder.mkdir()
    (folder / "log").write_text("something")
    return folder


def test_a_killed_driver_takes_all_processes_with_it(tmp_path: Path) -> None:
    folder = session_folder(tmp_path)
    command = [sys.executable, "-c", COMMAND, str(folder)]
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(SUPERVISOR), str(folder), *command], stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    assert [driver.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
    assert len(living_with(str(folder))) == 4  # the driver, the supervisor, the command and the one that hides
    driver.kill()
    driver.wait()
    wait_until(lambda: not living_with(str(folder)) and not folder.exists())


def test_a_supervisor_that_is_asked_to_end_ends_all_and_waits_for_it(tmp_path: Path) -> None:
    folder = session_folder(tmp_path)
    command = [sys.executable, str(SUPERVISOR), str(os.getpid()), str(folder), sys.executable, "-c", COMMAND]
    supervisor = subprocess.Popen([*command, str(folder)], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    assert [supervisor.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
    supervisor.terminate()
    supervisor.wait(timeout=PATIENCE)
    assert not living_with(str(folder))
    assert (folder / "log").exists(), "the folder is the driver's, which may read the log"


def test_a_command_that_ends_by_itself_gives_its_exit_code(tmp_path: Path) -> None:
    folder = session_folder(tmp_path)
    command = [sys.executable, str(SUPERVISOR), str(os.getpid()), str(folder), sys.executable, "-c", "exit(7)"]
    assert subprocess.run(command, timeout=PATIENCE, check=False).returncode == 7
    assert (folder / "log").exists()


def test_a_supervisor_that_is_killed_has_its_command_end(tmp_path: Path) -> None:
    folder = session_folder(tmp_path)
    command = ["sleep", "600"]
    supervisor = subprocess.Popen([sys.executable, str(SUPERVISOR), str(os.getpid()), str(folder), *command])
    children = Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    wait_until(lambda: children.read_text() != "")
    child = Path(f"/proc/{children.read_text().strip()}")
    wait_until(lambda: (child / "cmdline").read_text() == "sleep\x00600\x00")
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    wait_until(lambda: not child.exists() or ") Z " in (child / "stat").read_text())
