"""A filter of system calls (seccomp) for programs that a model wrote.

The filter lists the allowed calls: the calls that Python, numpy and threads need, and no call that names another
process, opens a connection, sends a signal, or makes memory that the limit of address space does not count. A call
that is not listed returns EPERM, so that the program sees an exception. An unlisted recent call returns ENOSYS, as on
an older kernel, so that the C library uses an older call instead. Calls that can name a process are allowed for the
calling process, whose number is 0.
"""

import errno
import platform
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|..|K
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
RECENT = 424  # from this number on all architectures share one table

# A call's name, its number on x86-64, its number on aarch64; a dash is no number
CALLS = """
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, lseek 8 62, close 3 57, close_range 436 436, dup 32 23, dup2 33 -,
    dup3 292 24, pipe 22 -, pipe2 293 59, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291,
    statfs 137 43, fstatfs 138 44, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
    readlinkat 267 78, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, umask 95 166,
    sendfile 40 71, fadvise64 221 223, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10, listxattr 194 11,
    llistxattr 195 12, flistxattr 196 13, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226,
    madvise 28 233, msync 26 227, mincore 27 232, brk 12 214, futex 202 98, set_robust_list 273 99,
    set_tid_address 218 96, rseq 334 293, sched_yield 24 124, getcpu 309 168, sched_get_priority_max 146 125,
    sched_get_priority_min 147 126, arch_prctl 158 -, rt_sigaction 13 134, rt_sigprocmask 14 135,
    rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132,
    restart_syscall 219 128, pause 34 -, alarm 37 -, getitimer 36 102, setitimer 38 103, signalfd 282 -,
    signalfd4 289 74, time 201 -, gettimeofday 96 169, nanosleep 35 101, timer_settime 223 110,
    timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, timerfd_create 283 85,
    timerfd_settime 286 86, timerfd_gettime 287 87, times 100 153, poll 7 -, ppoll 271 73, select 23 -,
    pselect6 270 72, epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
    epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -, eventfd2 290 19, sendto 44 206, recvfrom 45 207,
    sendmsg 46 211, recvmsg 47 212, shutdown 48 210, getsockname 51 204, getpeername 52 205, getsockopt 55 209,
    getpid 39 172, gettid 186 178, getppid 110 173, getpgrp 111 -, getuid 102 174, geteuid 107 175, getgid 104 176,
    getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getrlimit 97 163, setrlimit 160 164,
    getrusage 98 165, uname 63 160, sysinfo 99 179, getrandom 318 278, wait4 61 260, waitid 247 95, exit 60 93,
    exit_group 231 94
"""
# With bubblewrap also: its own start of Python, the change of user before the program, and files in the program's own
# folder
WRITES = """
    execve 59 221, setresuid 117 147, setresgid 119 149, setgroups 116 159, creat 85 -, unlink 87 -,
    unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
    link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, chmod 90 -, fchmod 91 52, fchmodat 268 53,
    fchmodat2 452 452, truncate 76 45, ftruncate 77 46, fallocate 285 47, utime 132 -, utimes 235 -,
    futimesat 261 -, utimensat 280 88, fsync 74 82, fdatasync 75 83, copy_file_range 326 285, open 2 -, openat 257 56
"""


@dataclass(frozen=True)
class Condition:
    """A condition on the low half of an argument: it is `in` the values, or has `some` or `none` of the values'
    bits."""

    argument: int
    test: Literal["in", "some", "none"]
    values: tuple[int, ...]


def _own_process(argument: int = 0) -> Condition:
    """An argument that names a process or thread must name the calling process or thread."""
    return Condition(argument, "in", (0,))


_READING = (0x1 | 0x2 | 0x40 | 0x200,)  # without O_WRONLY, O_RDWR, O_CREAT and O_TRUNC
_OWN_CLOCK = (Condition(0, "none", (1 << 31,)),)  # the clock of another process is a negative number
_NAMESPACES = 0x7E020080
CONDITIONS = {
    "prlimit64 302 261": (_own_process(),),
    "sched_getaffinity 204 123": (_own_process(),),
    "sched_getparam 143 121": (_own_process(),),
    "sched_getscheduler 145 120": (_own_process(),),
    "sched_rr_get_interval 148 127": (_own_process(),),
    "getpgid 121 155": (_own_process(),),
    "getsid 124 156": (_own_process(),),
    "get_robust_list 274 100": (_own_process(),),
    "clock_gettime 228 113": _OWN_CLOCK,
    "clock_getres 229 114": _OWN_CLOCK,
    "clock_nanosleep 230 115": _OWN_CLOCK,
    "timer_create 222 107": _OWN_CLOCK,
    # duplicates and flags; not the owner of a descriptor, who gets its signals
    "fcntl 72 25": (Condition(1, "in", (0, 1, 2, 3, 4, 1030, 1031, 1032)),),
    # TCGETS, FIONBIO, FIONREAD, TIOCGWINSZ, FIOCLEX, FIONCLEX
    "ioctl 16 29": (Condition(1, "in", (0x5401, 0x5421, 0x541B, 0x5413, 0x5451, 0x5450)),),
    "prctl 157 167": (Condition(0, "in", (15, 16, 0x53564D41)),),  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    # a stream of AF_UNIX cannot be sent elsewhere; asyncio makes one
    "socketpair 53 199": (Condition(0, "in", (1,)), Condition(1, "in", (1, 0x801, 0x80001, 0x80801))),
}
READING = {"open 2 -": (Condition(1, "none", _READING),), "openat 257 56": (Condition(2, "none", _READING),)}
THREADS = {"clone 56 220": (Condition(0, "some", (0x10000,)), Condition(0, "none", (_NAMESPACES,)))}  # CLONE_THREAD
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


def filter_program(*, read_only: bool, threads: bool = True) -> bytes | None:
    """The filter as an array of `struct sock_filter`; `None` on an architecture whose numbers are not above.

    `read_only` is for machines without bubblewrap: no call that writes to a file system or starts a program.
    """
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[platform.machine()]
    conditions = {**CONDITIONS, **(THREADS if threads else {}), **(READING if read_only else {})}
    parts = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(JUMP_EQUAL, architecture, 1, 0),
        _deny(),  # another instruction set, with other numbers
        _instruction(LOAD, NUMBER),
    ]
    for call in (CALLS if read_only else CALLS.rstrip() + "," + WRITES).split(","):
        parts += _allow_if(_number(call, column), ())
    for call, call_conditions in conditions.items():
        parts += _allow_if(_number(call, column), call_conditions)
    return b"".join([*parts, _instruction(JUMP_GREATER_EQUAL, RECENT, 0, 1), _deny(errno.ENOSYS), _deny()])


def _number(call: str, column: int) -> int | None:
    number = call.split()[1 + column]
    return None if number == "-" else int(number)


def _allow_if(number: int | None, conditions: Sequence[Condition]) -> list[bytes]:
    """Instructions that allow the call if its arguments meet the conditions, and deny it otherwise; none for a call
    without a number."""
    if number is None:
        return []
    body = [part for condition in conditions for part in _check_condition(condition)] + [_instruction(RETURN, ALLOW)]
    return [_instruction(JUMP_EQUAL, number, 0, len(body)), *body]


def _check_condition(condition: Condition) -> Iterator[bytes]:
    """Instructions that deny the call unless the condition holds."""
    yield _instruction(LOAD, ARGUMENTS + 8 * condition.argument)
    if condition.test == "in":
        for distance, value in zip(range(len(condition.values), 0, -1), condition.values, strict=True):
            yield _instruction(JUMP_EQUAL, value, distance, 0)
    else:
        (bits,) = condition.values
        yield _instruction(JUMP_ANY_BIT, bits, *((1, 0) if condition.test == "some" else (0, 1)))
    yield _deny()


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(number: int = errno.EPERM) -> bytes:
    return _instruction(RETURN, ERRNO | number)
