"""Moves the password of a Redis URL into the environment before the URL is stored, passed on or shown.

Invariant: the returned URL has no password, and no message quotes the URL that was given.
"""

import os
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlsplit

import typer

from polyreme.errors import StoreError
from polyreme.net.endpoint import is_loopback
from polyreme.net.ports import join

PASSWORD = "POLYREME_REDIS_PASSWORD"
SENTINEL_PASSWORD = "POLYREME_SENTINEL_PASSWORD"
"""The password of the Sentinels, which may have one of their own."""

_SENTINEL_PORT = 26379
_SCHEMES = ("redis", "rediss", "unix")


def redis_option(text: str) -> object:
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
    if not (given := _password_of(parts)):
        return url
    os.environ[PASSWORD] = given
    login, _, address = parts.netloc.rpartition("@")
    user = login.partition(":")[0]
    query = "&".join(word for word in parts.query.split("&") if not word.startswith("password="))
    return f"{parts.scheme}://{user}{'@' * bool(user)}{address}{parts.path}{'?' * bool(query)}{query}"


@dataclass(frozen=True)
class Watched:
    """A primary that Sentinels name.

    Attributes:
        name: what they call it.
        sentinel_urls: their URLs, at least one, with the same TLS and without a login.
        url: login, database and TLS of the primary. Its host is that of the first Sentinel.
    """

    name: str
    sentinel_urls: tuple[str, ...]
    url: str


def watched(url: str) -> Watched | None:
    """The primary of `redis://user@sentinel-1:26379/0?sentinel=NAME&sentinels=sentinel-2:26379,sentinel-3:26379`.

    None: the URL is that of the server itself. Raises StoreError: this is no Redis URL.
    """
    parts = split(url)
    words = [word.partition("=") for word in parts.query.split("&")]
    given = {name: unquote(value) for name, _, value in words if name in ("sentinel", "sentinels")}
    if not given:
        return None
    others = [split(f"redis://{each}") for each in given.get("sentinels", "").split(",") if each]
    if parts.scheme == "unix" or not given.get("sentinel") or not all(each.hostname for each in (parts, *others)):
        raise _invalid_url("Sentinels without the name of a primary or without a host")
    rest = "&".join(f"{name}{sign}{value}" for name, sign, value in words if name not in given)
    addresses = [join(each.hostname or "", each.port or _SENTINEL_PORT) for each in (parts, *others)]
    urls = tuple(parts._replace(netloc=each, path="", query=rest).geturl() for each in addresses)
    return Watched(given["sentinel"], urls, parts._replace(query=rest).geturl())


def exposure(url: str) -> str:
    """Who can command the Redis at `url`, and what to do, if this process reaches it without a password; else ''."""
    parts = split(url)
    # rediss:// may ask for a certificate; a socket has the rights of its file.
    if _password_of(parts) or os.environ.get(PASSWORD) or parts.scheme != "redis":
        return ""
    host = parts.hostname or "localhost"
    who = "user of its machine" if host == "localhost" or is_loopback(host) else "machine that reaches it, and every user there,"
    return (
        f"the Redis at {join(host, parts.port or 6379)} has no password: every {who} can read the run's samples and change what "
        f"it trains. Set `requirepass` there and {PASSWORD} here."
    )


def with_password(url: str, password: str) -> str:
    """The URL with a password, for a client in this process. An empty password, or one in the URL, leaves it as it is."""
    parts = split(url)
    if not password or _password_of(parts):
        return url
    if parts.scheme == "unix":
        return f"{url}{'&' if parts.query else '?'}password={quote(password, safe='')}"
    user, _, address = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{address}").geturl()


def split(url: str) -> SplitResult:
    """The parts of a Redis URL with a valid port. Raises StoreError, which quotes no part, since any may belong to a password."""
    try:
        parts, _ = (found := urlsplit(url)), found.port
    except ValueError:
        raise _invalid_url("an invalid address or port") from None
    if parts.scheme not in _SCHEMES:
        raise _invalid_url(f"none of the schemes {', '.join(_SCHEMES)}")
    if parts.scheme != "unix" and "@" in parts.path + parts.query + parts.fragment:
        raise _invalid_url("an @ after the address")
    return parts


def _password_of(parts: SplitResult) -> str:
    return unquote(parts.password) if parts.password else (parse_qs(parts.query).get("password") or [""])[0]


def _invalid_url(found: str) -> StoreError:
    return StoreError(
        "a Redis URL such as redis://127.0.0.1:6379/0",
        found,
        f"Fix the URL. Set its password in {PASSWORD}, or write / ? # [ ] @ in it as %2F %3F %23 %5B %5D %40.",
    )
