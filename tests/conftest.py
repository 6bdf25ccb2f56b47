"""Fixtures for all tests: a real Redis, and a fresh run in it."""

import atexit
import gc
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, settings
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.experience.store_errors import USER_RULES
from support.configs import run_config
from support.jitter import delay_tasks
from support.tiny_tokenizer import model_files

# No verdict depends on the speed of the machine, and every run uses the same examples. `make test-slow` uses the profile with random seeds
# and more examples.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", deadline=None, max_examples=500, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Delays tasks at random if JITTER, the seed, is set."""
    if seed := os.environ.get("JITTER"):
        delay_tasks(int(seed))


@pytest.fixture(autouse=True)
def no_lost_failure(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails a test in which a task's failure turns out to be lost; its own or an earlier test's."""
    yield
    messages = [
        record.getMessage() for when in ("setup", "call") for record in caplog.get_records(when) if record.name == "asyncio"
    ]
    assert not [message for message in messages if "never retrieved" in message]


_ALL_REAL = re.compile(r"^pytestmark = (?:\[[^\]]*)?pytest\.mark\.real\b", re.MULTILINE)
_NEEDS_REAL = re.compile(r"^(?!.*\bor\b).*(?<!not )\breal\b")
"""An expression that only real tests fulfil."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores the files from which `-m` selects nothing: those of real tests, or those without one. To import them takes every process
    seconds."""
    expression = config.option.markexpr
    if not re.fullmatch(r"test_\w+\.py", collection_path.name):
        return None
    if "not real" in expression:
        return True if _ALL_REAL.search(collection_path.read_text()) else None
    if _NEEDS_REAL.match(expression):
        return None if "mark.real" in collection_path.read_text() else True
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs storms and whole runs first: they mostly wait, so other tests can run at the same time."""
    items.sort(key=lambda item: item.path.name not in ("test_storm.py", "test_simulated_run.py"))


def pytest_collection_finish() -> None:
    """Thousands of modules are loaded: until the interpreter ends, a collection of garbage need not look at what they made."""
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A real server with production settings, on a free port, for the whole session. Its URL's user may do everything."""
    with EmbeddedServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: EmbeddedServer) -> str:
    """The URL of that server with a user who has no more than the rights that a run needs."""
    with BlockingRedis.from_url(redis_server.url) as client:
        client.execute_command("ACL", "SETUSER", "polyreme", "on", ">least", *USER_RULES.split())
    parts = urlsplit(redis_server.url)
    return parts._replace(netloc=f"polyreme:least@127.0.0.1:{parts.port}").geturl()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of that server."""
    client = await connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def run_id() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
async def run(redis: Redis, run_id: str, tmp_path: Path) -> Run:
    """A fresh run of 4 groups of 2 samples per iteration, on-policy."""
    return await Run.create(redis, run_id, run_config(tmp_path), {"config.json": b"{}", "tokenizer.json": b"[]"})


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration that passes every check: a model directory whose weights are empty, and one row of data."""
    (tmp_path / "model").mkdir()
    for name, content in model_files().items():
        (tmp_path / "model" / name).write_bytes(content)
    (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    return path
