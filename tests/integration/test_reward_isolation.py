"""Plugins that hang, crash, allocate, fork or reply falsely, among good items: every good item gets its score, every bad one a status."""

import asyncio
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polyreme.errors import ConfigError
from polyreme.isolation import processes
from support.processes import command_line, descendants
from support.rewards import item, scoring, serving, summary
from support.waiting import until, wait_until

PLUGIN = '''
import ctypes, os, signal, sys, tempfile, threading, time

def reward(response, label):
    """1 if the response is the label; otherwise what the response asks for."""
    act = globals().get("do_" + response)
    return act() if act else float(response == label)

def do_loop():
    while True: pass
def do_sleep():
    time.sleep(1000)
def do_block_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))
    for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
def do_hold_the_lock():
    ctypes.PyDLL(None).sleep(1000)
def do_allocate():
    kept = []
    while True: kept.append(bytearray(1 << 24))
def do_exit():
    os._exit(3)
def do_exit_soon():
    threading.Timer(0.05, os._exit, [3]).start()
    return 1.0
def do_sys_exit():
    sys.exit("enough")
def do_segfault():
    ctypes.string_at(0)
def do_fork():
    if os.fork() == 0: time.sleep(1000)
    return 1.0
def do_fork_and_return_twice():
    os.fork()
    return 1.0
def do_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(1000)
        os._exit(0)
    os.wait()
    return 1.0
def do_spin_behind():
    threading.Thread(target=do_loop, daemon=True).start()
    return 1.0
def do_raise():
    raise ValueError("no \\ud800 good")
def do_recurse():
    return do_recurse()
def do_keyboard():
    raise KeyboardInterrupt
def do_nan():
    return float("nan")
def do_string():
    return "1.0"
def do_none():
    return None
def do_list():
    return []
def do_print():
    print("x" * 5_000_000)
    sys.stderr.write("y" * 5_000_000)
    os.write(1, b"z" * 5_000_000)
    return 1.0
def do_close_everything():
    os.closerange(0, 100)
    return 1.0
def do_leave_a_file():
    tempfile.mkstemp()
    return 1.0
def do_chdir():
    os.chdir("/")
    return 1.0
def do_unprintable():
    class Odd(Exception):
        def __str__(self): raise RuntimeError
    raise Odd
'''
HANGS = ("loop", "sleep", "block_signals", "hold_the_lock")
EXPECTED = {
    **dict.fromkeys(HANGS, "TIMEOUT"),
    **dict.fromkeys(("allocate", "exit", "sys_exit", "segfault", "raise", "recurse", "keyboard", "close_everything"), "ERROR"),
    **dict.fromkeys(("nan", "string", "none", "list"), "INVALID"),
    **dict.fromkeys(
        ("fork", "fork_and_return_twice", "daemon", "exit_soon", "spin_behind", "print", "chdir", "leave_a_file"), "OK"
    ),
    "unprintable": "ERROR",
}


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "faulty.py"
    path.write_text(PLUGIN)
    return {"file": str(path)}


LIMITS = {"item_timeout": 60.0, "worker_memory_mib": 256, "workers": 2}
SOON = {**LIMITS, "item_timeout": 3.0}  # for items that hang; others need a thousandth of it


@pytest.mark.parametrize("fault", sorted(EXPECTED))
async def test_a_fault_gets_its_status_and_its_neighbours_their_scores(plugin: dict[str, str], fault: str) -> None:
    before = {p.pid for p in descendants()}
    async with scoring(plugin, **(SOON if fault in HANGS else LIMITS)) as scorer:
        answers = await scorer.score([item("a", "a"), item(fault), item("b", "a"), item("c", "c")])
        assert answers[1].status.name == EXPECTED[fault], answers[1].message
        assert EXPECTED[fault] == "OK" or answers[1].message
        assert summary([answers[0], *answers[2:]]) == [("OK", 1.0), ("OK", 0.0), ("OK", 1.0)]
        assert summary(await scorer.score([item("a", "a")] * 20)) == [("OK", 1.0)] * 20
    assert not [p for p in descendants() if p.pid not in before]


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select` can name."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    files = [os.dup(0) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
async def test_a_service_with_many_open_files_has_workers(plugin: dict[str, str]) -> None:
    async with scoring(plugin, **LIMITS) as scorer:
        assert summary(await scorer.score([item("a", "a")])) == [("OK", 1.0)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A directory whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("count", [120, pytest.param(1000, marks=pytest.mark.slow)])
async def test_random_faults_among_good_items(
    plugin: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    rng = random.Random(0)
    monkeypatch.setenv("TMPDIR", str(folder))
    quick = [fault for fault in EXPECTED if fault not in HANGS and fault != "spin_behind"]
    hangs = [fault for fault in HANGS if fault != "loop"]  # which computes until its deadline: it is in the test above
    faults = [rng.choice(quick) for _ in range(count - len(hangs))] + hangs
    rng.shuffle(faults)
    rows = [(fault, "x") for fault in faults] + [(f"r{k}", f"r{k - k % 2}") for k in range(2 * count)]
    rng.shuffle(rows)
    before, parent = {p.pid for p in descendants()}, psutil.Process()
    async with scoring(plugin, **SOON) as scorer:
        await scorer.score([item("warm", "warm")])
        files, memory = parent.num_fds(), parent.memory_info().rss
        answers = [
            answer
            for part in await asyncio.gather(
                *(
                    scorer.score([item(response, label) for response, label in rows[start : start + 100]])
                    for start in range(0, len(rows), 100)
                )
            )
            for answer in part
        ]
        for (response, label), answer in zip(rows, answers, strict=True):
            if response in EXPECTED:
                assert answer.status.name == EXPECTED[response], (response, answer)
            else:
                assert (answer.status.name, answer.score) == ("OK", float(response == label)), (response, answer)
        assert scorer.inside == 0
        assert parent.num_fds() <= files + 2
        assert parent.memory_info().rss < memory + (64 << 20)
        alive = [p for p in descendants() if p.pid not in before]
        assert len(alive) <= 1 + 2 + 2, "the keeper, the workers, and those being replaced"
        (workers,) = os.listdir(folder)
        assert len(os.listdir(folder / workers)) <= 2 + 2, "a folder for each of them"
    assert not [p for p in descendants() if p.pid not in before]
    assert not os.listdir(folder)


async def test_a_keeper_whose_words_are_unheard_ends_all_the_same(
    plugin: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers that end while the service closes leave the keeper's messages unread, and its connection reset."""
    before = {p.pid for p in descendants()}
    async with scoring(plugin, **{**LIMITS, "workers": 4}) as scorer:
        await scorer.score([item("a", "a")] * 20)
        _, *workers = await worker_pids()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(psutil.pid_exists, workers)))  # without a turn of the event loop, which would read them
    assert not [p for p in descendants() if p.pid not in before]
    assert "Traceback" not in capfd.readouterr().err


async def test_a_hang_lasts_until_its_deadline_and_holds_up_no_other(plugin: dict[str, str]) -> None:
    async with scoring(plugin, item_timeout=5.0) as scorer:
        begin = time.monotonic()
        answers = await scorer.score([item("sleep"), item("a", "a")])
        assert time.monotonic() - begin >= 5.0
        assert summary(answers) == [("TIMEOUT", 0.0), ("OK", 1.0)]


async def worker_pids() -> list[int]:
    (keeper,) = [p for p in descendants() if "polyreme.isolation.keeper" in command_line(p) and p.ppid() == psutil.Process().pid]
    return [keeper.pid, *(p.pid for p in keeper.children())]


@pytest.mark.parametrize("which", ["worker", "keeper"])
async def test_any_of_its_processes_may_be_killed(plugin: dict[str, str], which: str) -> None:
    async with scoring(plugin, **LIMITS) as scorer:
        await scorer.score([item("a", "a")])
        keeper, *workers = await worker_pids()
        psutil.Process(keeper if which == "keeper" else workers[0]).kill()
        assert summary(await scorer.score([item("a", "a")] * 50)) == [("OK", 1.0)] * 50


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def reward(response) return 1", "SyntaxError"),
        ("import nothing_of_this_name\n", "nothing_of_this_name"),
        ("import os\nos._exit(9)\n", "exited with status 9"),
        ("x = 1\n", "one reward function"),
        ("def one(response): return 1\ndef two(response): return 2\n", "one.*two"),
        ("def reward(temperature): return 1\n", "temperature"),
    ],
)
async def test_a_plugin_that_does_not_load_is_an_error_at_start(tmp_path: Path, code: str, said: str) -> None:
    before = {p.pid for p in descendants()}
    path = tmp_path / "broken.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=said):
        async with scoring({"file": str(path)}):
            pass
    assert not [p for p in descendants() if p.pid not in before]


async def test_a_file_that_is_not_there_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        async with scoring({"file": str(tmp_path / "nowhere.py")}):
            pass


async def test_an_async_plugin_a_neighbour_module_and_a_class_with_options(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_it.py").write_text("BONUS = 0.25\n")
    path = tmp_path / "slowly.py"
    path.write_text(
        "import asyncio\nfrom neighbour_of_it import BONUS\n\n"
        "async def helper(response, scale=1.0):\n    await asyncio.sleep(0.001)\n    return {'score': scale + BONUS, 'length': len(response)}\n"
        "def other(response):\n    return 0.0\n"
    )
    async with scoring({"file": str(path), "function": "helper", "options": {"scale": 2.0}}) as scorer:
        (answer,) = await scorer.score([item("abc")])
        assert (answer.score, [(p.name, p.raw) for p in answer.parts]) == (2.25, [("slowly", 2.25), ("slowly/length", 3.0)])
        assert scorer.rewards[0].version.startswith("helper-")


async def test_modules_and_installed_rewards_are_sources_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def length(response):\n    return len(response)\n")
    info = tmp_path / "my_rewards-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[polyreme.rewards]\nmy-length = my_rewards:length\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with scoring({"module": "my_rewards"}, {"name": "my-length", "weight": 10.0}) as scorer:
        (answer,) = await scorer.score([item("abc")])
        assert (answer.score, [p.name for p in answer.parts]) == (33.0, ["my_rewards", "my-length"])
        assert len({p.version for p in answer.parts}) == 1


WATCHFUL = '''
import ctypes, json, os, struct
from pathlib import Path

if Path(__file__).with_name("broken").exists():
    raise RuntimeError("it does not load any more")

def reward(response, label):
    """1 if the response is the label; it may show the environment, or write to every socket that it finds."""
    if response == "environment":
        return {"score": 0.0, **{name: 1.0 for name in os.environ}}
    if response == "dumpable":
        return ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
    if response in ("frame", "bytes"):  # as of the item whose number is the label, or the label as it is
        body = label.encode()
        if response == "frame":
            body = json.dumps([int(label), 1, 1.0, "", {}, [], False, False, ""]).encode()
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack("<I", len(body)) + body)
            except OSError:
                pass
    return float(response == label)
'''


@pytest.fixture
def watchful(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "watchful.py"
    path.write_text(WATCHFUL)
    return {"file": str(path)}


async def test_a_worker_knows_no_variable_but_the_usual_and_the_named(
    watchful: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POLYREME_TOKEN", "POLYREME_REDIS_PASSWORD", "API_KEY", "OTHER_API_KEY"):
        monkeypatch.setenv(name, "secret")
    async with scoring(watchful, worker_environment=["API_KEY"]) as scorer:
        (answer,) = await scorer.score([item("environment")])
        names = {part.name.removeprefix("watchful/") for part in answer.parts}
        assert {"PATH", "API_KEY"} <= names
        assert not names & {"POLYREME_TOKEN", "POLYREME_REDIS_PASSWORD", "OTHER_API_KEY"}


async def test_keeper_and_workers_refuse_to_be_inspected(watchful: dict[str, str]) -> None:
    async with scoring(watchful) as scorer:
        (answer,) = await scorer.score([item("dumpable")])  # a worker inherits its properties from its keeper
        assert answer.score == 0.0


async def test_a_frame_written_by_a_plugin_does_not_answer_another_item(watchful: dict[str, str]) -> None:
    async with scoring(watchful, workers=1) as scorer:
        assert summary(await scorer.score([item("frame", "0")])) == [("OK", 1.0)], "a frame of the right form"
        for _ in range(3):
            answers = await scorer.score([item("a", "a"), item("frame", str(10**9)), item("b", "b"), item("c", "x")])
            assert summary([answers[0], *answers[2:]]) == [("OK", 1.0), ("OK", 1.0), ("OK", 0.0)]
            assert answers[1].status.name == "INVALID"


@pytest.mark.parametrize(
    "frame",
    ["[" * 100_000, "{}", '[0, 1, 1%s, "", {}, [], false, false, ""]' % ("0" * 400), '[0, 1, 1, "", {"a": 1%s}, [], false, false, ""]' % ("0" * 400)],
    ids=["deep", "object", "value", "part"],
)  # fmt: skip
async def test_no_frame_of_a_plugin_ends_the_pool(watchful: dict[str, str], frame: str) -> None:
    async with scoring(watchful, workers=1) as scorer:
        (answer,) = await scorer.score([item("bytes", frame)])
        assert answer.status.name == "INVALID"
        assert summary(await scorer.score([item("a", "a")])) == [("OK", 1.0)]


async def test_a_keeper_that_is_stopped_is_replaced(watchful: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    async with scoring(watchful, workers=2, item_timeout=60.0) as scorer:
        await scorer.score([item("a", "a")])
        keeper, *workers = await worker_pids()
        monkeypatch.setattr(processes, "KEEPER_SECONDS", 0.5)
        os.kill(keeper, signal.SIGSTOP)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        scoring_all = asyncio.create_task(scorer.score([item("a", "a")] * 20))
        await until(lambda: not psutil.pid_exists(keeper))
        monkeypatch.setattr(processes, "KEEPER_SECONDS", 300.0)  # the next keeper is healthy, however slow
        assert summary(await scoring_all) == [("OK", 1.0)] * 20
        assert not psutil.pid_exists(keeper)
        assert scorer.rewards[0].available


async def test_a_service_whose_workers_do_not_come_back_is_not_ready(watchful: dict[str, str]) -> None:
    broken = Path(watchful["file"]).with_name("broken")

    async def until(status: int) -> None:
        async with asyncio.timeout(300):
            while (await client.get("/ready")).status_code != status:  # noqa: ASYNC110 another process's state
                await asyncio.sleep(0.05)

    async with serving(watchful) as (_, client, _):
        await until(200)
        broken.touch()
        for pid in (await worker_pids())[1:]:
            os.kill(pid, signal.SIGKILL)
        answers = (await client.post("/v1/score", json={"items": [{"response": "a", "label": "a"}]})).json()
        assert answers["results"][0]["status"] == "error"
        await until(503)
        broken.unlink()
        await until(200)
        answers = (await client.post("/v1/score", json={"items": [{"response": "a", "label": "a"}]})).json()
        assert answers["results"][0]["score"] == 1.0
