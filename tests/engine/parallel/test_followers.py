"""The processes of the followers: they end with rank 0, and their reasons are kept."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_groups import LIMIT, gone

from mbd_core.engine.parallel.followers import Followers

ENGINE = """
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.parallel.leader import start_parallel
followers = start_parallel(Path(sys.argv[1]), EngineConfig(max_rows=1, num_pages=8), size=2).followers
"""
ASLEEP = """
from mbd_core.engine.parallel.followers import Followers
followers = Followers(time.sleep, [(600,)])
"""


@pytest.mark.parametrize("followers", [ENGINE, ASLEEP], ids=["engine", "no group at all"])
def test_followers_end_with_a_killed_leader(folders: dict[str, Path], followers: str) -> None:
    """The leader is a script on standard input: it has neither a file nor a main guard, nothing that can be imported.
    Without a group, only the connection can tell a follower."""
    script = f"""
import sys, time
from pathlib import Path
{followers}
print(*followers.pids, flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-", str(folders["dense"])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdin is not None and leader.stdout is not None
        leader.stdin.write(script)
        leader.stdin.close()
        pid = int(leader.stdout.readline())
        try:
            assert not gone(pid, 1.5), "it lives as long as the leader"
        finally:
            leader.kill()
    assert gone(pid)


# What followers run here is no function of a module of the tests: importing that takes seconds in each process.
SLEEP_WHEN_STARTED = "import pathlib, time; pathlib.Path({!r}).touch(); time.sleep(600)"
BREAK_OFF = "raise OSError('no such device')"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_followers_outlive_the_thread_that_started_them_and_a_terminal_s_ctrl_c(tmp_path: Path) -> None:
    # a shell's background job ignores SIGINT, and its children do; the followers have to ignore it by themselves
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    signs = [tmp_path / "1", tmp_path / "2"]
    started: list[Followers] = []
    programs = [(SLEEP_WHEN_STARTED.format(str(sign)),) for sign in signs]
    thread = threading.Thread(target=lambda: started.append(Followers(exec, programs)))
    thread.start()
    thread.join()
    (followers,) = started
    signal.signal(signal.SIGINT, before)
    try:
        wait_until(lambda: all(sign.exists() for sign in signs))
        os.kill(followers.pids[0], signal.SIGINT)
        assert followers.failure(wait=0.5) is None and followers.alive
        os.kill(followers.pids[1], signal.SIGKILL)
        wait_until(lambda: followers.failure(wait=0.1) == "rank 2: ended by SIGKILL")
        assert not followers.alive
    finally:
        followers.end()
    assert all(gone(pid) for pid in followers.pids)


def test_a_reason_is_told_as_often_as_it_is_asked_for() -> None:
    followers = Followers(exec, [(BREAK_OFF,)])
    try:
        reasons = {followers.failure(wait=LIMIT) for _ in range(3)}
    finally:
        followers.end(LIMIT)
    assert reasons | {followers.failure(wait=0.1)} == {"rank 1: OSError: no such device"}
