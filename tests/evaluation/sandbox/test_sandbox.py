"""Hostile programs: each ends as a fail, quickly, with nothing outside touched and nothing left running."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mbd_core.evaluation.sandbox import programs
from mbd_core.evaluation.sandbox.plain_data import Value
from mbd_core.evaluation.sandbox.processes import Isolation, Limits, available_isolation, contained, landlock_version
from mbd_core.evaluation.sandbox.programs import Call, RunVerdict, run_calls, run_tests
from mbd_core.evaluation.sandbox.system_calls import filter_program

QUICK = Limits(wall_seconds=1.0, cpu_seconds=1)
TESTS = "def check(candidate):\n    assert candidate(2) == 3\n"
MARK = "sandbox-test-mark"

ISOLATIONS = ["bubblewrap", *(pytest.param(name, marks=pytest.mark.slow) for name in ("landlock", "filter"))]


@pytest.fixture(params=ISOLATIONS)
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Each way in which this machine can contain a program."""
    if request.param == "bubblewrap" and available_isolation() != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or this machine forbids it")
    if request.param == "landlock" and not landlock_version():
        pytest.skip("the kernel has no Landlock")
    if filter_program(read_only=True) is None:
        pytest.skip("no filter of system calls here")
    return request.param  # type: ignore[no-any-return]


def by_tests(program: str, isolation: Isolation) -> RunVerdict:
    return run_tests(program, tests=TESTS, check="check", entry_point="f", limits=QUICK, isolation=isolation)


def by_calls(program: str, isolation: Isolation) -> RunVerdict:
    def accept(number: int, out: Value) -> bool:
        return bool(out.value == 3 + number)

    calls = [Call(arguments=[2 + i], seconds=0.5, longest=1000) for i in range(2)]
    return run_calls(program, "f", calls, accept, limits=QUICK, isolation=isolation)


@pytest.mark.parametrize("run", [by_tests, by_calls])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return x + 1", "passed"),
        ("import numpy; return numpy.int64(x + 1)", "passed"),
        (
            "import threading; t = threading.Thread(target=len, args=('',)); t.start(); t.join(); return x + 1",
            "passed",
        ),
        ("print('noise' * 1000); return x + 1", "passed"),
        ("return x", "wrong"),
        ("return undefined", "error"),
        ("return (", "error"),
        ("return bytearray(1 << 34)", "memory"),
        ("while True: pass", "timeout"),
    ],
)
def test_how_a_program_ends_decides(run: object, body: str, reason: str) -> None:
    found = run(f"def f(x):\n    {body}\n", available_isolation())  # type: ignore[operator]
    assert found.reason == reason, found


ATTACKS = {
    "an infinite loop where it is defined": "while True: pass",
    "an infinite loop that catches everything": """
        def f(x):
            while True:
                try:
                    while True: pass
                except BaseException: pass""",
    "a signal that is ignored": """
        import signal
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        def f(x):
            while True: pass""",
    "a long sleep": "import time\ndef f(x): time.sleep(3600)",
    "a fork bomb": "import os\ndef f(x):\n    while True: os.fork()",
    "a bomb of threads": """
        import threading, time
        def f(x):
            while True: threading.Thread(target=time.sleep, args=(9,)).start()""",
    "all memory at once": "def f(x): return bytearray(1 << 40)",
    "memory bit by bit": "def f(x):\n    hog = []\n    while True: hog.append(bytearray(1 << 26))",
    "os._exit": "import os\ndef f(x): os._exit(0)",
    "os._exit while it is defined": "import os\nos._exit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "SystemExit while it is defined": "def f(x): return x + 1\nraise SystemExit(0)",
    "a crash": "import ctypes\ndef f(x): ctypes.string_at(0)",
    "closed output": "import os\ndef f(x):\n    os.closerange(0, 64)\n    return x + 1",
    "100 MB of output": "def f(x): print('x' * 100_000_000, flush=True); return 'x' * 100_000_000",
    "100 MB on every descriptor": """
        import os
        def f(x):
            for fd in range(64):
                try: os.write(fd, b'x' * 100_000_000)
                except OSError: pass""",
    "an answer that nests for ever": "def f(x):\n    a = []\n    for _ in range(10**6): a = [a]\n    return a",
    "a faked equality": """
        class Any:
            __class__ = int
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __sub__(self, other): return 0
            def __bool__(self): return True
        def f(x): return Any()""",
    "a faked equality of a number": """
        class Any(int):
            def __eq__(self, other): return True
            def __index__(self): return 3
            __hash__ = None
        def f(x): return Any(0)""",
    "patched builtins": """
        import builtins, json, marshal, os, sys
        builtins.exec = builtins.compile = builtins.isinstance = lambda *a, **k: True
        json.dumps = marshal.dumps = lambda *a, **k: 'passed'
        def f(x): return 0""",
    "a patched encoder": """
        import sys
        from mbd_core.evaluation.sandbox import plain_data
        plain_data.encode = plain_data._encode = lambda *a, **k: '["int",true,0.0]'
        def f(x): return 0""",
    "patched assertions": """
        import builtins
        builtins.AssertionError = SystemExit
        def f(x): return 0""",
    "a forged verdict": """
        import os
        def f(x):
            for fd in range(3, 64):
                try: os.write(fd, b'passed \\n={"reason": "passed"}\\n')
                except OSError: pass
            os._exit(0)""",
    "the tests in the frames": """
        import gc, sys
        def f(x):
            frame = sys._getframe()
            while frame:
                for name in list(frame.f_globals) + list(frame.f_locals):
                    if name in ('tests', 'expected', 'check', 'oracle'): return x + 1
                frame = frame.f_back
            for thing in gc.get_objects():
                if isinstance(thing, str) and 'candidate(2) ==' in thing: return x + 1
            return 0""",
    "the tests on the disk": """
        import os
        def f(x):
            for folder, _, files in os.walk('/'):
                if folder.startswith(('/usr', '/proc', '/sys')): continue
                for name in files:
                    try: text = open(os.path.join(folder, name), errors='replace').read(100000)
                    except OSError: continue
                    if name == 'sandbox-canary' or 'assert candidate(2) == 3' in text: return x + 1
            return 0""",
}


def attack(name: str, isolation: Isolation) -> list[RunVerdict]:
    import textwrap

    program = textwrap.dedent(ATTACKS[name]) + "\n"
    return [run(program, isolation) for run in (by_tests, by_calls)]


@pytest.mark.parametrize("name", [name for name in ATTACKS if "disk" not in name])
def test_an_attack_is_a_fail(name: str, isolation: Isolation) -> None:
    started = time.monotonic()
    for verdict in attack(name, isolation):
        assert verdict.reason != "passed", verdict
    assert time.monotonic() - started < 60
    assert not survivors()


def test_the_tests_are_not_on_the_disk_that_a_program_sees(tmp_path: Path) -> None:
    if available_isolation() != "bubblewrap":
        pytest.skip("without bubblewrap a program can read what its user can read")
    (tmp_path / "sandbox-canary").write_text("assert candidate(2) == 3")
    for verdict in attack("the tests on the disk", "bubblewrap"):
        assert verdict.reason != "passed", verdict


def survivors() -> list[str]:
    """Processes of the sandbox that are there a moment after its end."""
    found: list[str] = []
    for _ in range(100):
        found = [" ".join(line) for line in command_lines() if any("sandbox/child.py" in word for word in line)]
        found = [line for line in found if f" {os.getpid()} " not in line]
        if not found:
            break
        time.sleep(0.05)
    return found


def command_lines() -> Iterator[list[str]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in (1, os.getpid()) and words[0]:
            yield words


OUTSIDE = {
    "deletes": "import os; os.remove({canary!r})",
    "overwrites": "open({canary!r}, 'w').write('x')",
    "truncates": "import os; os.truncate({canary!r}, 0)",
    "removes the folder": "import shutil; shutil.rmtree({folder!r})",
    "writes beside": "open({folder!r} + '/new', 'w').write('x')",
    "writes 300 MB": "[open(f'big{{i}}', 'wb').write(b'x' * (1 << 20)) for i in range(300)]",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills everything": "import os; os.kill(-1, 9)",
    "kills its group": "import os; os.killpg({pid}, 9)",
    "reads the parent's environment": "return 3 if b'" + MARK + "' in open('/proc/{pid}/environ', 'rb').read() else 0",
    "has the parent's environment": "import os; return 3 if '" + MARK + "' in str(os.environ) else 0",
    "reaches the loopback": "import socket; socket.create_connection(('127.0.0.1', {port})); return 3",
    "listens": "import socket; socket.socket().bind(('127.0.0.1', 0)); return 3",
    "starts a program": "import subprocess; subprocess.Popen(['/bin/sleep', '99']); return 3",
    "leaves a daemon": "import os, time\n    if os.fork() == 0:\n        os.setsid(); time.sleep(99)\n    return 3",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); return 3",
    "leaves its namespaces": "import ctypes; return 3 if ctypes.CDLL(None).unshare(0x20000) == 0 else 0",
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_is_reached(
    name: str, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SANDBOX_TEST", MARK)
    canary = tmp_path / "canary"
    canary.write_text("alive")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        values = {"canary": str(canary), "folder": str(tmp_path), "pid": os.getpid(), "port": server.getsockname()[1]}
        program = "def f(x):\n    " + OUTSIDE[name].format(**values) + "\n"
        for verdict in (by_tests(program, isolation), by_calls(program, isolation)):
            assert verdict.reason != "passed", verdict
        with pytest.raises(BlockingIOError):
            server.accept()
    assert canary.read_text() == "alive"
    assert [path.name for path in tmp_path.iterdir()] == ["canary"]
    assert not survivors()


def test_a_program_has_no_stdin_and_with_bubblewrap_a_folder_of_its_own() -> None:
    program = (
        "import os, sys\ndef f(x):\n    open('mine', 'w').write('x')\n"
        "    return x + 1 if sys.stdin.read() == '' and os.listdir() == ['mine'] else 0\n"
    )
    expected = "passed" if available_isolation() == "bubblewrap" else "error"
    assert by_tests(program, available_isolation()).reason == expected
    assert not Path("mine").exists() and not Path("/mine").exists()


def test_tests_may_hand_over_plain_data_only_and_see_what_the_program_returns() -> None:
    program = "def f(*xs, key=0):\n    return {'all': (*xs, key)}\n"
    tests = "assert f([1], {2}, key=None) == {'all': ([1], {2}, None)}\n"
    run = {"entry_point": "f", "limits": QUICK}
    assert run_tests(program, tests=tests, **run).reason == "passed"  # type: ignore[arg-type]
    verdict = run_tests(program, tests="f(object())", **run)  # type: ignore[arg-type]
    assert (verdict.reason, "no plain data" in verdict.detail) == ("error", True)


def test_an_endless_test_ends_too() -> None:
    verdict = run_tests("def f(): pass", tests="while True: pass", entry_point="f", limits=QUICK)
    assert verdict.reason in ("timeout", "error")


def test_a_process_is_killed_with_the_body(isolation: Isolation) -> None:
    order = {"program": "def f(): pass", "entry_point": "f", "inputs": None, "convert": ""}
    read_fd, write_fd = os.pipe()
    with contained("answer", order, QUICK, input_fd=read_fd, isolation=isolation) as process:
        assert process.read_line(seconds=20, longest=10) == b"="
        assert [line for line in command_lines() if any("sandbox/child.py" in word for word in line)]
    os.close(read_fd)
    os.close(write_fd)
    assert not survivors()


WRONG_AT = "def f(x):\n    if x in {bad}:\n        {then}\n    return x\n"


@pytest.mark.parametrize(
    ("bad", "then", "reason", "detail"),
    [
        ({3}, "return -1", "wrong", "input 3"),
        ({3, 5, 8}, "return -1", "wrong", "input 3; wrong inputs: 3, 5, 8 (3 of 30)"),
        ({2, 4}, "raise ValueError", "error", "ValueError; wrong inputs: 2, 4 (2 of 30)"),
        ({7}, "import os; os._exit(3)", "error", "the process ended early with status 3"),
    ],
)
def test_all_wrong_inputs_are_named_and_the_first_one_decides(
    bad: set[int], then: str, reason: str, detail: str
) -> None:
    calls = [Call(arguments=[x], seconds=5.0, longest=1000) for x in range(30)]
    seen: list[int] = []

    def accept(number: int, out: Value) -> bool:
        seen.append(number)
        return bool(out.value == number)

    verdict = run_calls(WRONG_AT.format(bad=bad, then=then), "f", calls, accept, limits=Limits())
    assert (verdict.reason, verdict.detail) == (reason, detail)
    assert seen == sorted(set(seen)), "a program that goes on is judged once an input"


def test_the_inputs_after_a_wrong_one_are_bounded_in_number_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "FURTHER_SECONDS", 0.4)
    calls = [Call(arguments=[x], seconds=5.0, longest=1000) for x in range(200)]
    refused = run_calls("def f(x):\n    return -1\n", "f", calls[:60], lambda _, out: out.value >= 0, limits=Limits())
    assert refused.detail.endswith("19, ... (60 of 60)") or "of the first" in refused.detail
    slow = "import time\ndef f(x):\n    time.sleep(0.1)\n    return -1\n"
    begun = time.monotonic()
    verdict = run_calls(slow, "f", calls, lambda _, out: out.value >= 0, limits=Limits())
    assert verdict.detail.startswith("input 0; wrong inputs: 0, 1") and "of the first" in verdict.detail
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize(
    ("tests", "check", "detail"),
    [
        (
            "assert f(1) == 1\nassert f(2) == 0\nassert f(3) == 3\nassert f(4) == 0",
            "",
            "; wrong inputs: 1, 3 (2 of 4)",
        ),
        ("assert f(1) == 1\nassert f(2) == 0", "", ""),
        ("def check(c):\n    assert c(1) == 0\n    assert c(2) == 0, 'x'\n    assert c(3) == 3", "check", "2 of 3"),
        ("def check(c):\n    for n in (1, 2):\n        assert c(n) == 0\n    assert c(3) == 0", "check", ""),
        ("assert f(1) == 0\nassert f(9) == 0\nassert f(2) == 0", "", "; wrong inputs: 0, 1, 2 (3 of 3)"),
        ("assert f(1) == 0\nassert f(2) == 0\nassert f(7) == 0", "", "; wrong inputs: 0, 1 (2 of the first 2 of 3)"),
    ],
    ids=["module", "one", "check", "in a loop", "raises later", "never ends later"],
)
def test_every_assertion_that_fails_is_named_and_the_first_decides(tests: str, check: str, detail: str) -> None:
    program = "def f(n):\n    if n == 9:\n        raise KeyError\n    while n == 7:\n        pass\n    return n\n"
    verdict = run_tests(
        program, tests=tests, entry_point="f", limits=Limits(wall_seconds=4, cpu_seconds=2), check=check
    )
    assert verdict.reason == "wrong" and verdict.detail.startswith("a test's assertion failed")
    assert detail in verdict.detail and ("inputs" in verdict.detail) == bool(detail)


def test_an_assertion_that_raises_first_is_an_error_and_the_others_are_counted() -> None:
    program = "def f(n):\n    return 1 // n\n"
    tests = "assert f(0) == 0\nassert f(1) == 0\nassert f(1) == 1"
    verdict = run_tests(program, tests=tests, entry_point="f", limits=Limits())
    assert (verdict.reason, verdict.detail) == ("error", "ZeroDivisionError; wrong inputs: 0, 1 (2 of 3)")
