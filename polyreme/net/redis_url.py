"""Redis' address as users give it: a URL, whose password goes into the environment before anybody stores, passes on or shows the URL.

Kept here: what comes out has no password in it, and no message quotes a URL that went in.
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
    return typer.Option(envvar="POLYREME_REDIS", help=f"{text} A password belongs into {PASSWORD}.", callback=without_password)


def without_password(url: str | None) -> str | None:
    """The URL without its password, which this process and its children find in the environment from now on.

    Raises:
        StoreError: it is not the URL of a Redis.
    """
    if url is None:
        return None
    parts = split(url)
    given = unquote(parts.password) if parts.password else (parse_qs(parts.query).get("password") or [""])[0]
    if not given:
        return url
    os.environ[PASSWORD] = given
    who, _, place = parts.netloc.rpartition("@")
    user = who.partition(":")[0]
    query = "&".join(word for word in parts.query.split("&") if not word.startswith("password="))
    return f"{parts.scheme}://{user}{'@' * bool(user)}{place}{parts.path}{'?' * bool(query)}{query}"


def split(url: str) -> SplitResult:
    """The parts of a Redis URL, its port a number. Raises StoreError, which quotes none of them: any may be a piece of a password."""
    try:
        parts, _ = (found := urlsplit(url)), found.port
    except ValueError:
        raise _no_url("an address or port that cannot be read") from None
    if parts.scheme not in _SCHEMES:
        raise _no_url(f"none of the schemes {', '.join(_SCHEMES)}")
    if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise _no_url("an @ behind the address")
    return parts


def _no_url(found: str) -> StoreError:
    return StoreError(
        "a Redis URL such as redis://127.0.0.1:6379/0",
        found,
        f"Mend the URL. Its password belongs into {PASSWORD}; in the URL, / ? # [ ] and @ of it must be %2F %3F %23 %5B %5D and %40.",
    )
