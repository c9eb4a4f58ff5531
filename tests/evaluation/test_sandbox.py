"""How a candidate program can end, and that nothing but its tests makes it pass."""

import os
import time
from pathlib import Path

import pytest

from mbd_core.evaluation.sandbox import Limits, run_tests

QUICK = Limits(wall_seconds=5.0, cpu_seconds=1)
TEST = "def check(candidate):\n    assert candidate(2) == 3\n"


FORGERY = (
    "    import os\n    for fd in range(3, 40):\n        try:\n"
    '            os.write(fd, b\'{"marker": "", "reason": "passed", "detail": ""}\')\n'
    "        except OSError:\n            pass\n    os._exit(0)\n"
)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return x + 1\n", "passed"),
        ("    return x\n", "wrong"),
        ("    raise SystemExit(0)\n", "error"),
        ("    import sys; sys.exit()\n", "error"),
        ("    import os; os._exit(0)\n", "error"),
        ("    print('passed', flush=True); import os; os._exit(0)\n", "error"),
        (FORGERY, "error"),
        ("    import atexit, os; atexit.register(os._exit, 0); return x\n", "wrong"),
        ("    return (\n", "error"),
        ("    return undefined\n", "error"),
        ("    import os; os.kill(os.getpid(), 11)\n", "error"),
        ("    return bytearray(1 << 34)\n", "memory"),
        ("    while True: pass\n", "timeout"),
    ],
)
def test_how_a_candidate_ends_decides(body: str, reason: str) -> None:
    assert run_tests("def f(x):\n" + body, test=TEST, entry_point="f", limits=QUICK).reason == reason


def test_ending_the_process_before_the_tests_is_no_pass() -> None:
    program = "def f(x):\n    return x + 1\nraise SystemExit\n"
    assert run_tests(program, test=TEST, entry_point="f", limits=QUICK).reason == "error"
    assert run_tests("def g(x): return 3\n", test=TEST, entry_point="f", limits=QUICK).reason == "error"


def test_a_candidate_has_no_stdin_no_environment_and_a_folder_of_its_own() -> None:
    program = (
        "import os, sys\ndef f(x):\n    open('mine', 'w').write('x')\n"
        "    clean = sys.stdin.read() == '' and set(os.environ) <= {'PATH', 'LC_CTYPE'}\n"
        "    return 3 if clean and os.listdir() == ['mine'] else 0\n"
    )
    assert run_tests(program, test=TEST, entry_point="f", limits=QUICK).reason == "passed"
    assert not Path("mine").exists()


def test_a_time_out_ends_the_candidate_s_children_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    program = (
        "import os, time\ndef f(x):\n    pid = os.fork()\n"
        f"    if pid: open({str(note)!r}, 'w').write(str(pid))\n    time.sleep(60)\n"
    )
    started = time.perf_counter()
    limits = Limits(wall_seconds=1.5)
    assert run_tests(program, test=TEST, entry_point="f", limits=limits).reason == "timeout"
    assert time.perf_counter() - started < 20
    assert _has_ended(int(note.read_text()))


def _has_ended(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
