"""The filter of system calls for untrusted programs.

Invariant: independently of other isolation, a program stays one process, cannot reach another one, and has no memory that
RLIMIT_DATA does not count.

A refused call fails with EPERM and does not end the program. clone3 fails with ENOSYS, so libraries fall back to clone, whose
flags a filter can inspect. `assemble` encodes the filter in classic BPF, the kernel's format (linux/filter.h, linux/seccomp.h).
"""

import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass

# Numbers on x86_64 and aarch64 (asm/unistd_64.h, asm-generic/unistd.h). None: the architecture does not have the call.
_Numbers = dict[str, tuple[int | None, int | None]]

_NAMESPACES: _Numbers = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "open_tree_attr": (467, 467), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "statmount": (457, 457),
    "listmount": (458, 458),
}  # fmt: skip
_KERNEL: _Numbers = {
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None), "ioperm": (173, None),
    "vhangup": (153, 58), "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "personality": (135, 92), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_OTHER_PROCESSES: _Numbers = {
    "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}  # fmt: skip
_SHARED_MEMORY: _Numbers = {
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "semctl": (66, 191), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "map_shadow_stack": (453, 453),
}  # fmt: skip
_SOCKETS: _Numbers = {
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242),
}  # fmt: skip
# Landlock does not cover file attributes. Its first versions do not cover truncation.
_ATTRIBUTES: _Numbers = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "utime": (132, None), "utimes": (235, None), "utimensat": (280, 88),
    "futimesat": (261, None), "truncate": (76, 45),
}  # fmt: skip
_BY_ARGUMENT: _Numbers = {
    "clone": (56, 220), "kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119), "sched_setparam": (142, 118), "sched_setattr": (314, 274), "fcntl": (72, 25),
    "ioctl": (16, 29), "socketpair": (53, 199), "mmap": (9, 222),
}  # fmt: skip
_CLONE3 = 435  # on both architectures
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column in the tables, AUDIT_ARCH

_CLONE_THREAD = 0x10000
_SHARED_ANONYMOUS, _GROWS_DOWN = 0x21, 0x100  # MAP_SHARED | MAP_ANONYMOUS, MAP_GROWSDOWN
_SET_OWNER = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: indirect signals
_OWNER_OR_TERMINAL = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP, TIOCSTI
_ALL_BITS = 0xFFFFFFFF

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, ALU|AND|K, JMP|JEQ|K, JMP|JGE|K, RET|K
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_X32 = 0x40000000  # a second set of numbers on x86_64


@dataclass(frozen=True)
class _Rule:
    """Refuses a call if (argument & mask) is in `values`, or, with `unless`, if it is not."""

    name: str
    argument: int
    mask: int
    values: tuple[int, ...]
    unless: bool = False


def supported() -> bool:
    """Whether this module knows the system call numbers of this architecture."""
    return platform.machine() in _MACHINES


def filter_of(attributes: bool, pid: int | None = None, machine: str = platform.machine()) -> bytes:
    """The filter for one program.

    Args:
        attributes: whether to allow changes of file attributes. Safe only if the program sees no files but its own.
        pid: process id of the program if it shares a PID namespace with others; it may then signal only itself. None: it has its
            own namespace.
        machine: the architecture, as `platform.machine` names it.

    Returns:
        The array of struct sock_filter for the architecture.
    """
    never = {**_NAMESPACES, **_KERNEL, **_OTHER_PROCESSES, **_SHARED_MEMORY, **_SOCKETS, **({} if attributes else _ATTRIBUTES)}
    rules = [
        _Rule("clone", 0, _CLONE_THREAD, (_CLONE_THREAD,), unless=True),
        _Rule("mmap", 3, _SHARED_ANONYMOUS, (_SHARED_ANONYMOUS,)),
        _Rule("mmap", 3, _GROWS_DOWN, (_GROWS_DOWN,)),
        _Rule("socketpair", 0, _ALL_BITS, (1,), unless=True),  # AF_UNIX
        _Rule("socketpair", 1, 0xF, (1,), unless=True),  # SOCK_STREAM: a datagram socket can address any receiver
        _Rule("fcntl", 1, _ALL_BITS, _SET_OWNER),
        _Rule("ioctl", 1, _ALL_BITS, _OWNER_OR_TERMINAL),
    ]
    if pid is not None:
        own = ("kill", "tgkill", "prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
        rules += [_Rule(name, 0, _ALL_BITS, (0, pid), unless=True) for name in own]
    return assemble(never, rules, machine)


def assemble(never: _Numbers, rules: Iterable[_Rule], machine: str) -> bytes:
    """A filter that refuses calls that `never` or `rules` match, kills programs of another architecture, and allows the rest."""
    column, arch = _MACHINES[machine]
    refuse = _ERRNO | errno.EPERM
    code = [(_LOAD, 0, 0, _ARCH_AT), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER_AT)]
    code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, refuse)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for number in sorted(numbers[column] for numbers in never.values() if numbers[column] is not None):  # type: ignore[type-var]
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]  # type: ignore[list-item]
    for rule in rules:
        body = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument), (_AND, 0, 0, rule.mask)]
        for left, value in zip(range(len(rule.values) - 1, -1, -1), rule.values, strict=True):
            if rule.unless:  # a match jumps over the refusal
                body.append((_EQUAL, left + 1, 0, value))
            else:  # a match jumps to the refusal; the last comparison jumps over it otherwise
                body.append((_EQUAL, left, 0 if left else 1, value))
        body.append((_RETURN, 0, 0, refuse))
        number = _BY_ARGUMENT[rule.name][column]
        assert number is not None
        code += [(_LOAD, 0, 0, _NUMBER_AT), (_EQUAL, 0, len(body), number), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
