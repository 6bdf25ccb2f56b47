"""Drops access to files (Landlock), capabilities and system calls (seccomp), without any privilege.

Invariant: `Rules` is created before the fork. `confine` runs between fork and exec and only issues system calls. The structures
are described in Documentation/userspace-api/landlock.rst of Linux.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE = 1 << 14
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_WRITE = _OF_FILES | _READ_DIR | 1 << 5 | 1 << 8  # REMOVE_FILE, MAKE_REG: no directories, links, sockets, devices
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file access bits by version; later versions as 5
_CAPABILITY_VERSION = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def version() -> int:
    """The kernel's Landlock version, or 0 without Landlock."""
    return max(_libc.syscall(_CREATE_RULESET, None, 0, 1), 0)


class Rules:
    """A Landlock rule set: access to the given files only, no network, no signals or abstract sockets to other processes.

    Args:
        readable: files and directories to read and execute.
        writable: files to read and write, and directories in which to create and remove regular files.

    Raises:
        OSError: the kernel refuses the rule set.
    """

    def __init__(self, readable: Iterable[str], writable: Iterable[str]) -> None:
        abi = version()
        rights = (1 << _RIGHTS[min(abi, 5)]) - 1 if abi else 0
        attributes = struct.pack("=QQQ", rights, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
        self.fd = _checked(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
        try:
            for path in readable:
                self._allow(path, rights & _READ)
            for path in writable:
                self._allow(path, rights & _WRITE)
        except BaseException:
            self.close()
            raise

    def _allow(self, path: str, rights: int) -> None:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            if not os.path.isdir(path):
                rights &= _OF_FILES
            _checked(_libc.syscall(_ADD_RULE, self.fd, 1, struct.pack("=Qi", rights, fd), 0))
        finally:
            os.close(fd)

    def close(self) -> None:
        os.close(self.fd)


def confine(rules: Rules, syscalls: bytes) -> None:
    """Permanently removes capabilities, files and system calls from this process and its children. Raises OSError."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)))
    _checked(_libc.syscall(_RESTRICT_SELF, rules.fd, 0))
    install(syscalls)


def install(syscalls: bytes) -> None:
    """Installs a filter of system calls. Requires PR_SET_NO_NEW_PRIVS or CAP_SYS_ADMIN. Raises OSError."""
    buffer = ctypes.create_string_buffer(syscalls, len(syscalls))
    program = struct.pack("@HP", len(syscalls) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EPERM
        raise OSError(number, os.strerror(number))
    return result
