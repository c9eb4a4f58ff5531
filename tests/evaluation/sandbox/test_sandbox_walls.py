"""The walls around a program: what it sees and may write, which system calls it has, what it may read and use up."""

import os
import platform
import re
import resource
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from mbd_core.evaluation.sandbox import processes as sandbox
from mbd_core.evaluation.sandbox.processes import DEVICES, ISOLATED, THREADS, Isolation, Limits, available_isolation
from mbd_core.evaluation.sandbox.programs import Call, RunVerdict, run_calls
from mbd_core.evaluation.sandbox.system_calls import CALLS, CONDITIONS, READING, WRITES, filter_program
from mbd_core.evaluation.sandbox.system_calls import THREADS as CLONE

PATIENT = Limits(wall_seconds=60.0, cpu_seconds=60, memory_bytes=4 << 30)


@pytest.fixture(params=["bubblewrap", "landlock", "filter"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Each way in which this machine can contain a program."""
    if request.param == "bubblewrap" and available_isolation() != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or this machine forbids it")
    if request.param == "landlock" and not sandbox.landlock_version():
        pytest.skip("the kernel has no Landlock")
    if filter_program(read_only=True) is None:
        pytest.skip("no filter of system calls here")
    return request.param  # type: ignore[no-any-return]


def returned(program: str, argument: Any, isolation: Isolation) -> Any:
    """What the program's `f` returns; the run itself must end well."""
    found: list[Any] = []

    def keep(_number: int, out: Any) -> bool:
        found.append(out.value)
        return True

    calls = [Call(arguments=[argument], seconds=50.0, longest=1 << 24)]
    verdict = run_calls(textwrap.dedent(program), "f", calls, keep, limits=PATIENT, isolation=isolation)
    assert verdict == RunVerdict(reason="passed"), verdict
    return found[0]


# Opened to write first, so that nothing that cannot be written is read; what is written is the value just read.
WALK = """
    import os, stat
    def can_write(path):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            os.write(fd, os.read(reading, 4096))
        except OSError:
            pass
        return True
    def can_add(folder):
        path = os.path.join(folder, 'sandbox-walk')
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            return False
        os.remove(path)
        return True
    def f(roots):
        seen, writable, devices = 0, [], []
        for root in roots:
            for folder, _, names in os.walk(root):
                writable += [folder] if can_add(folder) else []
                for name in names:
                    path = os.path.join(folder, name)
                    try:
                        mode = os.lstat(path).st_mode
                    except OSError:
                        continue
                    seen += 1
                    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
                        devices.append(path)
                    elif stat.S_ISREG(mode) and can_write(path):
                        writable.append(path)
        return [seen, writable, devices]
"""
SOME = ["/proc/sys", "/proc/irq", "/proc/1", "/proc/self", "/sys/kernel", "/dev", "/etc", "/tmp", "/var/tmp"]


def test_a_program_can_write_nothing_that_it_sees_but_its_own_folder(isolation: Isolation) -> None:
    roots = ["/"] if isolation == "bubblewrap" else SOME
    seen, writable, devices = returned(WALK, roots, isolation)
    if isolation == "bubblewrap":
        assert seen > 1000 and set(devices) == set(DEVICES)
        assert writable == ["/tmp"]
    else:
        assert seen > 1000 or isolation == "landlock"
        assert writable == []


# Calls that name a process (x-86 numbers), in a form that changes nothing if it is allowed; P is the grader's number
OF_A_PROCESS = {
    "prlimit64": (302, "P", 4, 0, "buffer"),
    "getpriority": (140, 0, "P"),
    "setpriority": (141, 0, "P", 0),
    "setpriority of a user": (141, 2, 0, 0),
    "sched_getaffinity": (204, "P", 128, "buffer"),
    "sched_setaffinity": (203, "P", 0, "buffer"),
    "sched_getscheduler": (145, "P"),
    "sched_setscheduler": (144, "P", 0, "buffer"),
    "sched_getparam": (143, "P", "buffer"),
    "sched_setparam": (142, "P", "buffer"),
    "sched_getattr": (315, "P", "buffer", 48, 0),
    "sched_setattr": (314, "P", "buffer", 0),
    "sched_rr_get_interval": (148, "P", "buffer"),
    "ioprio_get": (252, 1, "P"),
    "ioprio_set": (251, 1, "P", 0),
    "kill": (62, "P", 0),
    "kill everything": (62, -1, 0),
    "tkill": (200, "P", 0),
    "tgkill": (234, "P", "P", 0),
    "rt_sigqueueinfo": (129, "P", 0, "buffer"),
    "rt_tgsigqueueinfo": (297, "P", "P", 0, "buffer"),
    "pidfd_open": (434, "P", 0),
    "ptrace": (101, 0x4206, "P", 0, 0),
    "process_vm_readv": (310, "P", 0, 0, 0, 0, 0),
    "process_vm_writev": (311, "P", 0, 0, 0, 0, 0),
    "process_madvise": (440, -1, 0, 0, 0, 0),
    "kcmp": (312, "P", "P", 1, 0, 0),
    "migrate_pages": (256, "P", 0, 0, 0),
    "move_pages": (279, "P", 0, 0, 0, 0, 0),
    "perf_event_open": (298, "buffer", "P", -1, -1, 0),
    "getpgid": (121, "P"),
    "setpgid": (109, "P", 0),
    "getsid": (124, "P"),
    "get_robust_list": (274, "P", "buffer", "buffer"),
    "capget": (125, "buffer", 0),
    "its clock": (228, "clock", "buffer"),
    "a descriptor's owner": (72, 0, 8, "P"),
    "a descriptor's signal": (72, 0, 10, 0),
    "core scheduling": (157, 62, 0, "P", 0, 0),
    "ptracer": (157, 0x59616D61, "P", 0, 0),
}
TRY_CALLS = """
    import ctypes, errno
    def f(calls):
        libc, allowed = ctypes.CDLL(None, use_errno=True), []
        buffer = ctypes.create_string_buffer(4096)
        for name, number, *arguments in calls:
            given = [ctypes.addressof(buffer) if one == 'buffer' else one for one in arguments]
            ctypes.set_errno(0)
            libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, given))
            if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                allowed.append(name)
        return allowed
"""


def x86_only() -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the numbers are those of x86-64")


def test_no_call_names_another_process(isolation: Isolation) -> None:
    x86_only()
    pid = os.getpid()
    named = {"P": 1 if isolation == "bubblewrap" else pid, "clock": (~pid << 3) | 2}
    calls = [[name, *(named.get(one, one) for one in call)] for name, call in OF_A_PROCESS.items()]  # type: ignore[call-overload]
    before = resource.prlimit(pid, resource.RLIMIT_CORE)
    assert returned(TRY_CALLS, calls, isolation) == []
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == before


def numbers(*texts: str) -> set[int]:
    return {int(call.split()[1]) for text in texts for call in text.split(",")}


OF_A_PROBE = {335, 336}  # uretprobe and uprobe end the calling process; filters do not see them


def test_every_call_that_is_not_listed_is_denied(isolation: Isolation) -> None:
    x86_only()
    listed = numbers(CALLS, WRITES, *CONDITIONS, *READING, *CLONE)
    unlisted = [[str(number), number, *6 * [-1]] for number in range(600) if number not in listed | OF_A_PROBE]
    assert len(unlisted) > 350
    assert returned(TRY_CALLS, unlisted, isolation) == []


def test_the_numbers_are_those_of_the_kernel_s_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm-generic/unistd.h")
    if not all(path.exists() for path in header):
        pytest.skip("no kernel headers here")
    for column, path in enumerate(header, start=1):
        found = re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\b", path.read_text())
        known = {"newfstatat": dict(found).get("fstatat"), **dict(found)}
        for text in (CALLS, WRITES, *CONDITIONS, *READING, *CLONE):
            for call in text.split(","):
                name, number = call.split()[0], call.split()[column]
                assert number in ("-", known.get(name, number)), (name, path)
                assert number != "-" or name not in known, (name, path)


READ_WHAT_IS_RIGHT = """
    import glob, os
    def f(given):
        pid, canary = given
        found = []
        for path in [f'/proc/{pid}/cmdline', f'/proc/{pid}/environ', f'/proc/{pid}/maps', canary]:
            try:
                found.append(open(path, 'rb').read(20) and path)
            except OSError:
                pass
        for path in glob.glob('/proc/[0-9]*/mem'):
            try:
                open(path, 'rb')
            except OSError:
                continue
            if path != f'/proc/{os.getpid()}/mem':
                found.append(path)
        return found
"""


def test_what_is_right_cannot_be_read(isolation: Isolation, tmp_path: Path) -> None:
    canary = tmp_path / "solutions.jsonl"
    canary.write_text("assert candidate(2) == 3")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    pid = os.getpid()
    found = returned(READ_WHAT_IS_RIGHT, [pid, str(canary)], isolation)
    if isolation in ISOLATED:
        assert found == []
    else:
        assert set(found) <= {f"/proc/{pid}/cmdline", str(canary)}, "files can be read, memory cannot"


def test_threads_have_a_limit(isolation: Isolation) -> None:
    program = """
        import threading, time
        def f(x):
            threading.stack_size(32768)
            for number in range(x):
                try:
                    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
                except RuntimeError:
                    return number
            return x
    """
    assert 1 <= returned(program, 1000, isolation) <= THREADS + (0 if os.geteuid() == 0 else 500)


def test_a_program_of_root_is_a_user_of_its_own_without_rights(isolation: Isolation) -> None:
    if not sandbox.has_own_user(isolation):
        pytest.skip("the grader is not root, or may not change its user")
    program = """
        import os, ctypes
        def f(_):
            return [os.getresuid() + os.getresgid(), os.getgroups()]
    """
    (ids, groups), (others, _) = (returned(program, 0, isolation) for _ in range(2))
    assert len(set(ids)) == 1 and ids[0] > 1000 and groups == []
    assert others[0] != ids[0], "two programs are two users"


ASYNCIO = """
    import asyncio
    def f(x):
        async def twice():
            await asyncio.sleep(0.01)
            return 2 * x
        return asyncio.run(twice())
"""


def test_asyncio_works_and_its_sockets_reach_nobody(isolation: Isolation) -> None:
    assert returned(ASYNCIO, 4, isolation) == 8
    program = """
        import socket
        def f(_):
            found = []
            for family, kind in ((1, 2), (1, 5), (30, 1)):
                try:
                    found.append(socket.socketpair(family, kind) and kind)
                except OSError:
                    pass
            one, _ = socket.socketpair()
            for ask in (lambda: one.connect(chr(0) + 'x'), lambda: one.bind(chr(0) + 'y')):
                try:
                    found.append(ask())
                except OSError:
                    pass
            return found
    """
    assert returned(program, 0, isolation) == []


def test_a_right_program_that_sleeps_has_the_time_of_a_free_machine() -> None:
    """Idle time is the program's own: a limit of a second ends a sleep after a second, not after four."""
    limits = Limits(wall_seconds=3.0, cpu_seconds=5)
    calls = [Call(arguments=[seconds], seconds=1.0, longest=1000) for seconds in (0.0, 60.0)]
    started = time.monotonic()
    verdict = run_calls("import time\ndef f(x):\n    time.sleep(x)\n", "f", calls, lambda *_: True, limits=limits)
    assert verdict.reason == "timeout" and time.monotonic() - started < 2.9
    calls = [Call(arguments=[0.8], seconds=1.0, longest=1000) for _ in range(20)]
    started = time.monotonic()
    verdict = run_calls("import time\ndef f(x):\n    time.sleep(x)\n", "f", calls, lambda *_: True, limits=limits)
    assert verdict.reason == "timeout" and 2.5 < time.monotonic() - started < 5, "all calls together have 3 s"


def test_a_busy_machine_does_not_shorten_the_time_of_a_program_that_computes() -> None:
    before = sandbox.ProcessorUse(computed=1.0, delayed=0.5)
    waiting = sandbox.ProcessorUse(computed=1.2, delayed=0.6, ready=True)
    assert waiting.own_seconds(3.0, before) == pytest.approx(0.2), "ready, and another has the processor"
    idle = sandbox.ProcessorUse(computed=1.2, delayed=1.5, ready=False)
    assert idle.own_seconds(3.0, before) == pytest.approx(2.0), "one second of waiting is not its own"
    assert sandbox.ProcessorUse().own_seconds(3.0, sandbox.ProcessorUse()) == 3.0, (
        "wall time where the machine says nothing"
    )
