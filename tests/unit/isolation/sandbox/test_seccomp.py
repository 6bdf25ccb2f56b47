"""The filter of system calls, run by a small interpreter of classic BPF, so that any machine tests all architectures."""

import errno
import struct

import pytest

from polyreme.isolation.sandbox import seccomp

ALLOWED, REFUSED, MISSING, KILLED = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
TABLES = [value for name, value in vars(seccomp).items() if name.startswith("_") and isinstance(value, dict)][:-1]
NUMBERS = {name: numbers for table in TABLES for name, numbers in table.items()}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PID = 4321


def decide(code: bytes, architecture: int, number: int, *arguments: int) -> int:
    """The kernel's decision for a call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", code))
    assert len(instructions) <= 4096, "the kernel takes no more"
    at = accumulator = 0
    while True:
        operation, if_true, if_false, operand = instructions[at]
        at += 1
        match operation:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, operand)
            case 0x54:
                accumulator &= operand
            case 0x15:
                at += if_true if accumulator == operand else if_false
            case 0x35:
                at += if_true if accumulator >= operand else if_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(hex(operation))


@pytest.fixture(params=sorted(ARCHITECTURES))
def machine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(machine: str, code: bytes, name: str, *arguments: int) -> int | None:
    number = NUMBERS[name][["x86_64", "aarch64"].index(machine)]
    return None if number is None else decide(code, ARCHITECTURES[machine], number, *arguments)


def test_refused_calls_are_refused_and_others_are_not(machine: str) -> None:
    code = seccomp.filter_of(attributes=True, machine=machine)
    for name in ("unshare", "ptrace", "socket", "fork", "memfd_create", "keyctl", "io_uring_setup", "pidfd_send_signal"):
        assert ask(machine, code, name) in (REFUSED, None), name
    assert ask(machine, code, "chmod") in (ALLOWED, None)
    assert ask(machine, seccomp.filter_of(attributes=False, machine=machine), "fchmodat") == REFUSED
    read, execve = {"x86_64": (0, 59), "aarch64": (63, 221)}[machine]
    for number in (read, execve):
        assert decide(code, ARCHITECTURES[machine], number) == ALLOWED
    assert decide(code, ARCHITECTURES[machine], 435) == MISSING  # clone3
    assert decide(code, ARCHITECTURES[machine], 0x40000000 | read) == REFUSED
    assert decide(code, 0x40000003, read) == KILLED  # 32 bits


@pytest.mark.parametrize(
    ("name", "arguments", "decision"),
    [
        ("clone", (0x3D0F00,), ALLOWED),  # a thread of pthread_create
        ("clone", (17,), REFUSED),  # a process
        ("clone", (0x10000011,), REFUSED),
        ("mmap", (0, 4096, 3, 0x22), ALLOWED),  # private
        ("mmap", (0, 4096, 3, 0x21), REFUSED),  # shared
        ("mmap", (0, 4096, 3, 0x23), REFUSED),
        ("mmap", (0, 4096, 1, 0x01, 3), ALLOWED),  # a file
        ("mmap", (0, 4096, 3, 0x122), REFUSED),  # a stack that grows
        ("socketpair", (1, 1), ALLOWED),
        ("socketpair", (1, 0x80001), ALLOWED),
        ("socketpair", (1, 2), REFUSED),
        ("socketpair", (2, 1), REFUSED),
        ("fcntl", (3, 4), ALLOWED),
        ("fcntl", (3, 8), REFUSED),
        ("fcntl", (3, 10), REFUSED),
        ("fcntl", (3, 15), REFUSED),
        ("ioctl", (3, 0x5401), ALLOWED),
        ("ioctl", (3, 0x8901), REFUSED),
        ("kill", (PID, 9), ALLOWED),
        ("kill", (0, 9), ALLOWED),
        ("kill", (1, 9), REFUSED),
        ("kill", (0xFFFFFFFF, 9), REFUSED),
        ("kill", (0xFFFFFFFFFFFFFFFF, 9), REFUSED),
        ("tgkill", (PID, PID + 1, 9), ALLOWED),
        ("tgkill", (1, 1, 9), REFUSED),
        ("prlimit64", (0, 7), ALLOWED),
        ("prlimit64", (1, 7), REFUSED),
    ],
)
def test_arguments_decide(machine: str, name: str, arguments: tuple[int, ...], decision: int) -> None:
    assert ask(machine, seccomp.filter_of(attributes=False, pid=PID, machine=machine), name, *arguments) == decision


def test_a_program_with_ids_of_its_own_may_signal_itself(machine: str) -> None:
    assert ask(machine, seccomp.filter_of(attributes=True, machine=machine), "kill", 1, 9) == ALLOWED
