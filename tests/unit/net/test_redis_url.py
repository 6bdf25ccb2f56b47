"""A password is removed from any Redis URL and never shown."""

import os
from typing import Any
from urllib.parse import quote

import pytest
import typer
import typer.main
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.connection import parse_url

from polyreme.cli.main import build_app, commands
from polyreme.errors import StoreError
from polyreme.net.redis_url import PASSWORD, Watched, exposure, watched, with_password, without_password


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PASSWORD, "")  # so that it is also restored


@pytest.mark.parametrize(
    ("url", "stripped", "password"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0", ""),
        ("redis://me@redis:6379", "redis://me@redis:6379", ""),
        ("redis://:secret@redis:6379/0", "redis://redis:6379/0", "secret"),
        ("rediss://me:se%2Fcret@[::1]:6379/2?db=1", "rediss://me@[::1]:6379/2?db=1", "se/cret"),
        ("redis://redis/0?password=secret&db=1", "redis://redis/0?db=1", "secret"),
        ("rediss://me:secret@s1:1?sentinel=main&sentinels=s2:2", "rediss://me@s1:1?sentinel=main&sentinels=s2:2", "secret"),
        ("unix:///run/redis.sock?password=se%26cret", "unix:///run/redis.sock", "se&cret"),
        ("unix://me:secret@/run/redis.sock?db=1", "unix://me@/run/redis.sock?db=1", "secret"),
    ],
)
def test_the_password_moves_to_the_environment(url: str, stripped: str, password: str) -> None:
    assert (without_password(url), os.environ[PASSWORD]) == (stripped, password)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.sampled_from(["", "me"]))
def test_any_password_is_the_one_that_redis_would_get(password: str, user: str) -> None:
    url = f"redis://{user}:{quote(password, safe='')}@redis:6379/3"
    expected = parse_url(url)
    assert expected.pop("password") == password
    stripped = without_password(url)
    assert os.environ[PASSWORD] == password
    assert stripped is not None and parse_url(stripped) == expected


@pytest.mark.parametrize("url", ["redis://redis:6379/0", "rediss://me@[::1]:6379/2?db=1", "unix:///run/redis.sock?db=1"])
def test_a_password_that_is_added_is_the_one_that_redis_gets(url: str) -> None:
    with_it = with_password(url, "se/c@r?t")
    assert parse_url(with_it)["password"] == "se/c@r?t"
    assert (without_password(with_it), os.environ[PASSWORD]) == (url, "se/c@r?t")
    assert with_password(with_it, "other") == with_it
    assert with_password(url, "") == url


@pytest.mark.parametrize(
    ("url", "who"),
    [
        ("redis://127.0.0.1:6379/0", "every user of its machine"),
        ("redis://localhost", "every user of its machine"),
        ("redis://[::1]:6379", "every user of its machine"),
        ("redis://10.0.0.1", "every machine that reaches it"),
        ("redis://redis:6379/0?db=1", "every machine that reaches it"),
        ("redis://:secret@redis:6379", ""),
        ("redis://redis:6379?password=secret", ""),
        ("rediss://redis:6379", ""),
        ("unix:///run/redis.sock", ""),
    ],
)
def test_a_redis_without_a_password_is_a_warning(url: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert who in exposure(url) and bool(exposure(url)) == bool(who)
    monkeypatch.setenv(PASSWORD, "secret")
    assert exposure(url) == ""


def test_the_sentinels_of_a_url() -> None:
    assert watched("redis://redis:6379/0?db=1") is None
    found = watched("rediss://me@s1/2?ssl_ca_certs=/ca.pem&sentinel=main&sentinels=s2:2,[::1]")
    urls = tuple(f"rediss://{each}?ssl_ca_certs=/ca.pem" for each in ("s1:26379", "s2:2", "[::1]:26379"))
    assert found == Watched("main", urls, "rediss://me@s1/2?ssl_ca_certs=/ca.pem")


@pytest.mark.parametrize(
    "url",
    ["redis://s1?sentinel=", "redis://s1?sentinels=s2", "unix:///run/s?sentinel=main", "redis://s1?sentinel=main&sentinels=:1"],
)
def test_sentinels_without_a_name_or_a_host(url: str) -> None:
    with pytest.raises(StoreError, match="Sentinels without the name of a primary or without a host"):
        watched(url)


@pytest.mark.parametrize(
    "url",
    [
        "secret@redis:6379",
        "me:secret@redis",
        "http://:secret@redis",
        "redis://:secret",
        "redis://:sec/secret@redis:6379",
        "redis://:12/secret@redis:6379",
        "redis://:12?secret@redis:6379",
        "redis://:12#secret@redis:6379",
        "redis://:[secret@redis:6379",
        "redis://:se]cret@redis:secret",
    ],
)
def test_an_invalid_url_is_not_shown(url: str) -> None:
    with pytest.raises(StoreError) as caught:
        without_password(url)
    assert "secret" not in str(caught.value)
    assert os.environ[PASSWORD] == ""


def redis_options(command: Any) -> list[Any]:
    """The parameters of a command and its subcommands that concern Redis; none for a command that works on files only."""
    found = [each for each in command.params if "redis" in f"{each.name} {each.opts} {each.envvar}".lower()]
    return found + [each for inner in getattr(command, "commands", {}).values() for each in redis_options(inner)]


def loaded(name: str) -> Any:
    return vars(typer.main.get_command(build_app([name])))["commands"][name]


@pytest.mark.parametrize("name", ["up", "audit", "rollout", "reward", "train"])
def test_the_option_of_a_command_is_found(name: str) -> None:
    assert len(redis_options(loaded(name))) == 1


@pytest.mark.parametrize("name", [command.name for command in commands()])
def test_every_command_takes_the_password_out(name: str) -> None:
    command = loaded(name)
    for option in redis_options(command):
        with typer.Context(command) as context:
            assert option.process_value(context, "redis://:secret@redis:6379/0") == "redis://redis:6379/0"
        assert os.environ.pop(PASSWORD) == "secret"
