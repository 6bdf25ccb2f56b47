"""Moves the password of a Redis URL into the environment before the URL is stored, passed on or shown.

Invariant: the returned URL has no password, and no message quotes the URL that was given.
"""

import os
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import typer

from polyreme.errors import StoreError

PASSWORD = "POLYREME_REDIS_PASSWORD"

_SCHEMES = ("redis", "rediss", "unix")


def redis_option(text: str) -> Any:
    """The command line's `--redis`; `text` is its help."""
    return typer.Option(envvar="POLYREME_REDIS", help=f"{text} Set a password in {PASSWORD}.", callback=without_password)


def without_password(url: str | None) -> str | None:
    """The URL without its password, which is put into this process's environment.

    Raises:
        StoreError: this is no Redis URL.
    """
    if url is None:
        return None
    parts = split(url)
    given = unquote(parts.password) if parts.password else (parse_qs(parts.query).get("password") or [""])[0]
    if not given:
        return url
    os.environ[PASSWORD] = given
    login, _, address = parts.netloc.rpartition("@")
    user = login.partition(":")[0]
    query = "&".join(word for word in parts.query.split("&") if not word.startswith("password="))
    return f"{parts.scheme}://{user}{'@' * bool(user)}{address}{parts.path}{'?' * bool(query)}{query}"


def split(url: str) -> SplitResult:
    """The parts of a Redis URL with a valid port. Raises StoreError, which quotes no part, because any may belong to a password."""
    try:
        parts, _ = (found := urlsplit(url)), found.port
    except ValueError:
        raise _invalid_url("an invalid address or port") from None
    if parts.scheme not in _SCHEMES:
        raise _invalid_url(f"none of the schemes {', '.join(_SCHEMES)}")
    if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise _invalid_url("an @ after the address")
    return parts


def _invalid_url(found: str) -> StoreError:
    return StoreError(
        "a Redis URL such as redis://127.0.0.1:6379/0",
        found,
        f"Fix the URL. Set its password in {PASSWORD}, or write / ? # [ ] @ in it as %2F %3F %23 %5B %5D %40.",
    )
