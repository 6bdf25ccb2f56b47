"""Programs that try to leave their sandbox, and the targets that they would change if they succeeded.

`python -m support.escapes MODE [NAME...]` (with tests/ on the path) runs them one by one, as the reward service would, next to a victim
process, guarded files and listening sockets. It prints a JSON object with the achievement of each attempt, empty for none; the exit status
is 0 when all are empty. The caller may also put the secret into the environment. An attempt knows everything: pids, paths, ports, the
address of the secret. It has succeeded when it prints ESCAPED, or when the world outside has changed.
"""

import ctypes
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polyreme_reward
from polyreme.isolation.sandbox import seccomp
from polyreme.isolation.sandbox.program import Limits, Mode
from polyreme.isolation.sandbox.run import run

SECRET = "correct-horse-battery-staple"
LIMITS = Limits(seconds=30.0, memory_mib=96, disk_mib=8, threads=32)

PRELUDE = """
import ctypes, json, os, signal, socket, sys
F = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print("ESCAPED", *what, flush=True)
def call(name, *args): return libc.syscall(F["numbers"][name], *args)
def secret(text): "SECRET" in text and escaped(text[:100])
def files(*paths):
    for path in paths:
        try: secret(open(path, errors="replace").read(1 << 20))
        except OSError: pass
""".replace("SECRET", SECRET)


@dataclass(frozen=True)
class Attempt:
    """One program. `harmless`: it may run without a sandbox, where it must succeed. `endless`: only its time limit ends it."""

    name: str
    program: str
    harmless: bool = False
    endless: bool = False


ATTEMPTS = [
    # Secrets of the service.
    Attempt("environ of the parent", "files(f\"/proc/{F['pid']}/environ\")", harmless=True),
    Attempt("environ of every process", "files(*(f'/proc/{pid}/environ' for pid in range(1, 70000) if os.path.exists(f'/proc/{pid}')))"),
    Attempt("memory of the parent", "open(f\"/proc/{F['pid']}/mem\", 'rb'); escaped()", harmless=True),
    Attempt(
        "process_vm_readv of the parent",
        """
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(F["size"])
ours, theirs = Vector(ctypes.addressof(buffer), F["size"]), Vector(F["address"], F["size"])
call("process_vm_readv", F["pid"], ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
secret(buffer.value.decode())""",
        harmless=True,
    ),
    Attempt("ptrace of the parent", "call('ptrace', 0x4206, F['victim'], 0, 0) == 0 and escaped()", harmless=True),
    Attempt("descriptors of the parent", "call('pidfd_getfd', os.pidfd_open(F['pid']), 0, 0) >= 0 and escaped()", harmless=True),
    Attempt("descriptors of the parent in /proc", "os.listdir(f\"/proc/{F['pid']}/fd\"); escaped()", harmless=True),
    Attempt("kcmp with the parent", "call('kcmp', os.getpid(), F['pid'], 1, 0, 0) >= 0 and escaped()", harmless=True),
    Attempt("descriptors left open", "[escaped(fd) for fd in range(3, 256) if not libc.fcntl(fd, 1) < 0]"),
    Attempt("processes in /proc", "[escaped(name) for name in os.listdir('/proc') if name.isdigit()]", harmless=True),
    Attempt("command lines in /proc", "open(f\"/proc/{F['pid']}/cmdline\").read(); escaped()", harmless=True),
    Attempt("root of another process", "os.listdir(f\"/proc/{F['victim']}/root/\"); escaped()", harmless=True),
    # Files.
    Attempt("a secret file", "files(F['secret'])", harmless=True),
    Attempt("a secret file by a symbolic link", "os.symlink(F['secret'], 'link'); files('link')", harmless=True),
    Attempt("a secret file by a hard link", "os.link(F['secret'], 'hard'); files('hard')"),
    Attempt("a secret file by ..", "files('../' * 20 + F['secret'])", harmless=True),
    Attempt("a secret file by a handle", "call('name_to_handle_at', -100, F['secret'].encode(), ctypes.create_string_buffer(bytes([128]) + bytes(200)), ctypes.byref(ctypes.c_int()), 0) == 0 and escaped()"),
    Attempt("a secret file after exec", "os.execv(sys.executable or F['python'], ['python', '-c', f\"print('ESCAPED', open({F['secret']!r}).read())\"])", harmless=True),
    Attempt("LD_PRELOAD and exec", "os.execve(F['python'], ['python', '-c', f\"import os; os.kill({F['victim']}, 9)\"], {'LD_PRELOAD': F['secret']})"),
    Attempt("a directory of the service", "os.listdir(F['folder']); escaped()", harmless=True),
    Attempt("the service's code", "open(F['source']).read(); escaped()", harmless=True),
    Attempt("/etc/passwd", "open('/etc/passwd').read(); escaped()", harmless=True),
    Attempt("a new file outside", "open(F['folder'] + '/new', 'w').write('x')", harmless=True),
    Attempt("a longer file outside", "open(F['secret'], 'a').write('x')", harmless=True),
    Attempt("a shorter file outside", "os.truncate(F['secret'], 0)", harmless=True),
    Attempt("a file removed outside", "os.unlink(F['secret'])", harmless=True),
    Attempt("a file renamed outside", "os.rename(F['secret'], F['folder'] + '/other')", harmless=True),
    Attempt("another mode of a file", "os.chmod(F['secret'], 0o777)", harmless=True),
    Attempt("another owner of a file", "os.chown(F['secret'], os.getuid(), os.getgid()); escaped()", harmless=True),
    Attempt("another time of a file", "os.utime(F['secret'], (1, 1))", harmless=True),
    Attempt("an attribute of a file", "os.setxattr(F['secret'], 'user.x', b'x'); escaped()"),
    Attempt("a file in /dev/shm that stays", "open('/dev/shm/' + F['token'], 'w').write('x')", harmless=True),
    Attempt("a file in /tmp that stays", "open('/tmp/' + F['token'], 'w').write('x')", harmless=True),
    Attempt("a file in /var/tmp that stays", "open('/var/tmp/' + F['token'], 'w').write('x')", harmless=True),
    Attempt("Python's library changed", "open(F['library'], 'r+').close(); escaped()"),
    Attempt("a module in the packages", "open(sys.path[-1] + '/' + F['token'] + '.py', 'w').close(); escaped()"),
    Attempt("a device node", "os.mknod('node', 0o600 | 0o060000, os.makedev(254, 0)); open('node', 'rb').read(1); escaped()"),
    Attempt("devices of the machine", "[escaped(name) for name in ('mem', 'kmsg', 'kvm', 'fuse', 'vda', 'sda') if os.access('/dev/' + name, os.R_OK) and open('/dev/' + name, 'rb')]"),
    Attempt("settings of the kernel", "open('/proc/sys/kernel/core_pattern', 'r+').close(); escaped()"),
    Attempt("control groups", "os.mkdir('/sys/fs/cgroup/' + F['token']); escaped()"),
    # Other processes.
    Attempt("whether a process is there", "os.kill(F['victim'], 0); escaped()", harmless=True),
    Attempt("SIGUSR1 to the parent", "os.kill(F['pid'], signal.SIGUSR1)", harmless=True),
    Attempt("SIGSTOP to an ancestor", "os.kill(F['victim'], signal.SIGSTOP)", harmless=True),
    Attempt("SIGKILL to another process", "os.kill(F['victim'], signal.SIGKILL)", harmless=True),
    Attempt("SIGKILL to everybody", "os.kill(-1, signal.SIGKILL)"),
    Attempt("SIGKILL to the parent's group", "os.kill(-F['group'], signal.SIGKILL)"),
    Attempt("SIGKILL by pidfd", "call('pidfd_send_signal', os.pidfd_open(F['victim']), 9, 0, 0)", harmless=True),
    Attempt("SIGKILL to a thread", "call('tkill', F['victim'], 9)", harmless=True),
    Attempt("SIGKILL to a thread of a group", "call('tgkill', F['victim'], F['victim'], 9)", harmless=True),
    Attempt("a queued signal", "call('rt_sigqueueinfo', F['victim'], 9, (ctypes.c_int * 32)(9, 0, -1))", harmless=True),
    Attempt(
        "SIGKILL by the owner of a descriptor",
        """
import fcntl
read, write = os.pipe()
fcntl.fcntl(read, 10, 9); fcntl.fcntl(read, fcntl.F_SETOWN, F["victim"])
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC); os.write(write, b"x")""",
        harmless=True,
    ),
    Attempt("limits of another process", "import resource; resource.prlimit(F['victim'], resource.RLIMIT_NOFILE, (9, 9))", harmless=True),
    Attempt("priority of another process", "os.setpriority(os.PRIO_PROCESS, F['victim'], 19); escaped()", harmless=True),
    Attempt("cores of another process", "os.sched_setaffinity(F['victim'], {0}); escaped()", harmless=True),
    Attempt("schedule of another process", "os.sched_setscheduler(F['victim'], os.SCHED_IDLE, os.sched_param(0)); escaped()", harmless=True),
    # Child processes.
    Attempt("a fork", "os.fork(); escaped()", harmless=True),
    Attempt("a fork bomb", "while True:\n    os.fork(); escaped()"),
    Attempt("a vfork", "call('clone', 0x4000 | signal.SIGCHLD, 0, 0, 0, 0) >= 0 and (escaped(), os._exit(0))"),
    Attempt("clone3", "libc.syscall(435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD), 88) >= 0 and (escaped(), os._exit(0))", harmless=True),
    Attempt("a subprocess", "import subprocess; subprocess.run(['/bin/true']); escaped()", harmless=True),
    Attempt("a daemon that outlives the test", """
import time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2); open("/tmp/" + F["token"], "w").close()
"""),
    Attempt("threads without end", """
import threading, time
for count in range(100_000): threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); count > 200 and escaped(count)
"""),
    Attempt("threads with small stacks", """
import threading, time
threading.stack_size(65536)
for count in range(5_000): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
escaped()
"""),
    Attempt("a call in 32 bits", """
import mmap, platform
if platform.machine() == "x86_64":  # mov eax, 2 (fork); int 0x80; ret
    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    page.write(bytes([0xB8, 2, 0, 0, 0, 0xCD, 0x80, 0xC3]))
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))() >= 0 and escaped()"""),
    Attempt("the other numbers of x86_64", "libc.syscall(0x40000000 | 57) >= 0 and (escaped(), os._exit(0))"),
    # Network and sockets.
    Attempt("TCP", "socket.create_connection(('127.0.0.1', F['tcp'])); escaped()", harmless=True),
    Attempt("TCP over IPv6", "socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', F['tcp'])); escaped()"),
    Attempt("UDP", "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', F['udp']))", harmless=True),
    Attempt("a listening port", "socket.create_server(('127.0.0.1', 0)); escaped()", harmless=True),
    Attempt("a Unix socket", "socket.socket(socket.AF_UNIX).connect(F['unix']); escaped()", harmless=True),
    Attempt("an abstract Unix socket", "socket.socket(socket.AF_UNIX).connect('\\0' + F['token']); escaped()", harmless=True),
    Attempt("a datagram from a pair", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', '\\0' + F['token'] + '-datagram')", harmless=True),
    Attempt("a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); escaped()"),
    Attempt("a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); escaped()"),
    Attempt("a netlink socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); escaped()", harmless=True),
    Attempt("a socket to the host of a virtual machine", "socket.socket(socket.AF_VSOCK); escaped()"),
    Attempt("io_uring", "call('io_uring_setup', 4, ctypes.create_string_buffer(120)) >= 0 and escaped()"),
    # Namespaces and the kernel.
    Attempt("a user namespace", "libc.unshare(0x10000000) == 0 and escaped()", harmless=True),
    Attempt("a network namespace", "libc.unshare(0x50000000) == 0 and escaped()", harmless=True),
    Attempt("the network namespace of the machine", "libc.setns(os.open(f\"/proc/{F['pid']}/ns/net\", 0), 0) == 0 and escaped()"),
    Attempt("namespaces by pidfd", "libc.setns(os.pidfd_open(F['pid']), 0x60020000) == 0 and escaped()"),
    Attempt("a mount", "libc.mount(b'none', b'/tmp', b'tmpfs', 0, b'') == 0 and escaped()"),
    Attempt("a mount to write", "libc.mount(b'none', b'/', None, 0x20 | 0x1000, None) == 0 and escaped()"),
    Attempt("an unmount", "libc.umount2(b'/tmp', 2) == 0 and escaped()"),
    Attempt("chroot", "os.chroot('.'); escaped()"),
    Attempt("user 0", "os.getuid() == 0 or (os.setuid(0), escaped())"),
    Attempt("capabilities", "libc.prctl(23, 21, 0, 0, 0) == 1 and libc.prctl(47, 2, 21, 0, 0) == 0 and escaped()"),
    Attempt("capabilities after exec", "os.execv(F['python'], ['python', '-c', 'import os; os.mknod(\"n\", 0o20600, os.makedev(1, 5)); print(\"ESCAPED\")'])"),
    Attempt("higher limits", "import resource; resource.setrlimit(resource.RLIMIT_DATA, (-1, -1)); escaped()"),
    Attempt("bpf", "call('bpf', 0, ctypes.create_string_buffer(128), 128) >= 0 and escaped()"),
    Attempt("perf_event_open", "call('perf_event_open', ctypes.create_string_buffer(bytes([1, 0, 0, 0, 128]) + bytes(123)), 0, -1, -1, 0) >= 0 and escaped()"),
    Attempt("userfaultfd", "call('userfaultfd', 1) >= 0 and escaped()"),
    Attempt("the keyring of the user", "call('add_key', b'user', F['token'].encode(), b'x', 1, -4) >= 0 and escaped()"),
    Attempt("another time of the machine", "import time; time.clock_settime(time.CLOCK_REALTIME, time.time()); escaped()"),
    Attempt("another name of the machine", "libc.sethostname(b'x', 1) == 0 and escaped()"),
    Attempt("the terminal", "import fcntl; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), 0x5412, b'x'); escaped()"),
    # Memory, disk, time.
    Attempt("private memory", "x = bytearray(300 << 20); escaped(len(x))"),
    Attempt("memory in small pieces", "x = []\nwhile len(x) < 3000: x.append(bytes(100_000) + b'x')\nescaped()"),
    Attempt("shared memory", "import mmap; m = mmap.mmap(-1, 300 << 20)\nfor k in range(0, 300 << 20, 4096): m[k] = 1\nescaped()"),
    Attempt("a stack that grows", """
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
at = libc.mmap(None, 300 << 20, 3, 0x122, -1, 0)
if at != ctypes.c_void_p(-1).value: ctypes.memset(at, 1, 300 << 20); escaped()"""),
    Attempt("memory shared by a device", """
import mmap
m = mmap.mmap(os.open("/dev/zero", os.O_RDWR), 300 << 20)
for k in range(0, 300 << 20, 4096):
    m[k] = 1
    if k % (32 << 20) == 0: m.madvise(mmap.MADV_DONTNEED)  # it stays, but counts for no process
escaped()"""),
    Attempt("page tables", """
import mmap, time
m = mmap.mmap(-1, 1 << 39, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
for k in range(0, 1 << 39, 1 << 21): m[k]
time.sleep(0.5); escaped()"""),
    Attempt("files without a name", """
import time
for _ in range(40):
    fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x"); os.write(fd, bytes(4 << 20))
time.sleep(0.5); escaped()"""),
    Attempt("files without a name that are mapped", """
import time
libc.mmap.restype = ctypes.c_void_p
for _ in range(40):
    fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x"); os.write(fd, bytes(4 << 20))
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)); os.close(fd)
time.sleep(0.5); escaped()"""),
    Attempt("files without a name in secret", """
import time
libc.prctl(4, 0, 0, 0, 0)
for _ in range(40):
    fd = os.open("x", os.O_RDWR | os.O_CREAT); os.unlink("x"); os.write(fd, bytes(4 << 20))
time.sleep(0.5); escaped()"""),
    Attempt("a file in memory", "fd = os.memfd_create('x'); escaped()", harmless=True),
    Attempt("System V shared memory", "libc.shmget(0x5ec2e7, 4096, 0o1600) >= 0 and escaped()"),
    Attempt("a POSIX message queue", "call('mq_open', b'x', 0o102, 0o600, 0) >= 0 and escaped()"),
    Attempt("one large file", "open('large', 'wb').write(bytes(64 << 20)); escaped()"),
    Attempt("many files", "[open(f'{k}', 'wb').write(bytes(1 << 20)) for k in range(200)]; escaped()"),
    Attempt("a flood of empty files", "libc.prctl(4, 0, 0, 0, 0); [open(str(k), 'w').close() for k in range(100_000)]; escaped()"),
    Attempt("a flood of output", "while True: os.write(1, b'x' * 65536)"),
    Attempt("no end, and no signal heard", "[signal.signal(n, signal.SIG_IGN) for n in range(1, 65) if n not in (9, 19, 32, 33)]\nsignal.pthread_sigmask(0, range(1, 65))\nwhile True: pass", endless=True),
    Attempt("no end of the end", "import atexit, time; atexit.register(time.sleep, 1000)", endless=True),
]  # fmt: skip


@dataclass
class World:
    """The environment of the programs, which must not change."""

    folder: Path
    token: str
    received: list[str]
    victim: "subprocess.Popen[bytes]"

    def snapshot(self) -> dict[str, Any]:
        status = Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0]
        files = {}
        for path in sorted(self.folder.iterdir()):
            found = path.stat()
            text = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            files[path.name] = (found.st_mode, found.st_size, found.st_mtime_ns, text)
        return {
            "victim": (self.victim.pid, status if status in "TZ" else "runs"),
            "limits": resource.prlimit(self.victim.pid, resource.RLIMIT_NOFILE),
            "priority": os.getpriority(os.PRIO_PROCESS, self.victim.pid),
            "cores": sorted(os.sched_getaffinity(self.victim.pid)),
            "schedule": os.sched_getscheduler(self.victim.pid),
            "files": files,
            "left": [name for where in ("/dev/shm", "/tmp", "/var/tmp") if os.path.exists(name := f"{where}/{self.token}")],
            "received": list(self.received),
        }

    def renew(self) -> None:
        """Restores the world after an attempt that changed it."""
        end(self.victim)
        self.victim = subprocess.Popen(["sleep", "1000"])
        for where in ("/dev/shm", "/tmp", "/var/tmp"):
            with suppress(FileNotFoundError):
                os.unlink(f"{where}/{self.token}")
        for path in self.folder.iterdir():
            if not path.is_socket():
                path.unlink()
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o600)


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


@contextmanager
def world() -> Iterator[tuple[World, dict[str, Any]]]:
    """Creates the world of an attempt, and its description for the attempt."""
    token = f"escape-{os.getpid()}"
    folder = Path(tempfile.mkdtemp())
    received: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: received.append("SIGUSR1"))
    sockets = {
        "tcp": socket.create_server(("127.0.0.1", 0)),
        "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
        "unix": socket.socket(socket.AF_UNIX),
        "abstract": socket.socket(socket.AF_UNIX),
        "datagram": socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    }
    sockets["udp"].bind(("127.0.0.1", 0))
    sockets["unix"].bind(f"{folder}/socket")
    sockets["abstract"].bind(f"\0{token}")
    sockets["datagram"].bind(f"\0{token}-datagram")
    for name in ("unix", "abstract"):
        sockets[name].listen()
    for name in ("udp", "datagram"):
        threading.Thread(target=_note, args=(sockets[name], name, received), daemon=True).start()
    buffer = ctypes.create_string_buffer(SECRET.encode())
    here = World(folder, token, received, subprocess.Popen(["sleep", "1000"]))
    here.renew()
    facts = {
        "numbers": numbers(),
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "address": ctypes.addressof(buffer),
        "size": len(SECRET),
        "secret": f"{folder}/secret",
        "folder": str(folder),
        "source": polyreme_reward.__file__,
        "library": os.__file__,
        "python": os.path.realpath(sys.executable),
        "token": token,
        "tcp": sockets["tcp"].getsockname()[1],
        "udp": sockets["udp"].getsockname()[1],
        "unix": f"{folder}/socket",
    }
    try:
        yield here, facts
    finally:
        here.renew()
        end(here.victim)
        for each in sockets.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        shutil.rmtree(folder)


def _note(sock: socket.socket, name: str, received: list[str]) -> None:
    with suppress(OSError):
        while sock.recv(100):
            received.append(name)


def numbers() -> dict[str, int]:
    """System call numbers of this machine."""
    column = 0 if os.uname().machine == "x86_64" else 1
    tables = [value for name, value in vars(seccomp).items() if name.startswith("_") and isinstance(value, dict)]
    return {name: each[column] for table in tables for name, each in table.items() if isinstance(each, tuple) and each[column]}


def main(mode: Mode, names: list[str]) -> bool:
    """Runs the attempts; without a sandbox only the harmless ones. Returns whether any succeeded."""
    if names or mode is not Mode.NONE:
        chosen = [attempt for attempt in ATTEMPTS if not names or attempt.name in names]
    else:
        chosen = [attempt for attempt in ATTEMPTS if attempt.harmless]
    achieved = {}
    with world() as (here, facts):
        for attempt in chosen:
            facts["victim"] = here.victim.pid
            before = here.snapshot()
            limits = replace(LIMITS, seconds=0.5) if attempt.endless else LIMITS
            ended = run(mode, {"kind": "script", "program": PRELUDE + attempt.program}, json.dumps(facts), limits)
            after = here.snapshot()
            for _ in range(100 if mode is Mode.NONE and b"ESCAPED" not in ended.stdout else 0):
                if after != before:
                    break
                time.sleep(0.05)  # signals and datagrams may take a while to arrive
                after = here.snapshot()
            changed = {name: after[name] for name in after if after[name] != before[name]}
            said = ended.stdout[:200].decode(errors="replace") if b"ESCAPED" in ended.stdout else ""
            achieved[attempt.name] = said + (f" changed {changed}" if changed else "")
            if changed:
                here.renew()
    print(json.dumps({"user": os.getuid(), "achieved": achieved}))
    return any(achieved.values())


if __name__ == "__main__":
    raise SystemExit(main(Mode(sys.argv[1]), sys.argv[2:]))
