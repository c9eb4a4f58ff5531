"""A filter of system calls (seccomp) for programs that a model wrote.

Denied calls return EPERM, so that the program sees an exception. A program can start threads and no processes, opens
no sockets, sends no signals and makes no memory that its limit of address space does not count. `read_only` also
denies every call that writes to a file system or starts another program: for machines without bubblewrap.
"""

import errno
import platform
import struct
from collections.abc import Iterable, Iterator

LOAD, JUMP_EQUAL, JUMP_GREATER_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|..|K
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
CLONE_THREAD = 0x10000
X32 = 0x40000000
WRITING = 0x1 | 0x2 | 0x40 | 0x200  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC

# name: number on x86-64 (-1: it has none), number on aarch64
PROCESSES = {"fork": (57, -1), "vfork": (58, -1), "setsid": (112, 157), "setpgid": (109, 154)}
SIGNALS = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}
MEMORY = {"memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190)}
KERNEL = {
    "socket": (41, 198),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "mq_open": (240, 180),
}
CLONE, CLONE3 = (56, 220), (435, 435)
OPEN, OPENAT = (2, -1), (257, 56)
FILE_WRITES = {
    "openat2": (437, 437),
    "creat": (85, -1),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "link": (86, -1),
    "linkat": (265, 37),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "execve": (59, 221),
    "execveat": (322, 281),
}
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH_*


def filter_program(*, read_only: bool) -> bytes | None:
    """The filter as an array of `struct sock_filter`; `None` on an architecture whose numbers are not above."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return None
    column, architecture = ARCHITECTURES[platform.machine()]
    denied = [*PROCESSES.values(), *SIGNALS.values(), *MEMORY.values(), *KERNEL.values()]
    denied += FILE_WRITES.values() if read_only else ()
    parts = [
        _one(LOAD, ARCHITECTURE),
        _one(JUMP_EQUAL, architecture, 1, 0),
        _deny(),  # another instruction set, with other numbers
        _one(LOAD, NUMBER),
        *_denials(pair[column] for pair in denied),
        _one(JUMP_EQUAL, CLONE3[column], 0, 1),
        _deny(errno.ENOSYS),  # its flags are out of a filter's reach; libc then calls clone
        *_argument_rule(CLONE[column], 0, CLONE_THREAD, denied_if_set=False),
    ]
    if column == 0:
        parts += [_one(JUMP_GREATER_EQUAL, X32, 0, 1), _deny()]
    if read_only:
        for call, argument in ((OPEN, 1), (OPENAT, 2)):
            parts += _argument_rule(call[column], argument, WRITING, denied_if_set=True)
    return b"".join([*parts, _one(RETURN, ALLOW)])


def _one(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _deny(number: int = errno.EPERM) -> bytes:
    return _one(RETURN, ERRNO | number)


def _denials(numbers: Iterable[int]) -> Iterator[bytes]:
    for number in numbers:
        if number >= 0:
            yield _one(JUMP_EQUAL, number, 0, 1)
            yield _deny()


def _argument_rule(number: int, argument: int, bits: int, *, denied_if_set: bool) -> list[bytes]:
    """Deny the call if any of the bits of an argument is set (or if none is)."""
    if number < 0:
        return []
    return [
        _one(JUMP_EQUAL, number, 0, 4),
        _one(LOAD, ARGUMENTS + 8 * argument),
        _one(JUMP_ANY_BIT, bits, int(not denied_if_set), int(denied_if_set)),
        _deny(),
        _one(RETURN, ALLOW),
    ]
