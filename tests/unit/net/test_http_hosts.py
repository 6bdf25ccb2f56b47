"""A request through the browser of a user is refused when another web page made it, whichever name it gave this address."""

import socket

import pytest

from polyreme.net.http_hosts import HOSTS, own_names, refusal

NAMES = frozenset({"gpu-node", "trainer.example"})


def status(host: str | None, origin: str | None = None) -> int | None:
    pairs = ((b"host", host), (b"origin", origin))
    found = refusal({"headers": [(name, text.encode()) for name, text in pairs if text is not None]}, NAMES)
    return None if found is None else found[0]


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8430", "page.localhost:8430", "localhost.:80", "127.0.0.1", "127.0.0.1:8430", "[::1]", "[::1]:8430",
        "10.1.2.3:8080", "[fd00::7]:8080", "gpu-node", "GPU-node:8430", "trainer.example.", None,
    ],
)  # fmt: skip
def test_its_own_names_and_every_address_in_digits_are_answered(host: str | None) -> None:
    assert status(host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8430", "localhost.evil.example", "evil-localhost", "127.0.0.1.evil.example", "notlocalhost",
        "gpu-node.evil.example", "x.gpu-node", "", ":8430", "127.0.0.1@evil.example", "[::1", "0x7f000001", "2130706433", "127.1",
    ],
)  # fmt: skip
def test_another_name_is_refused(host: str) -> None:
    assert status(host) == 421


def test_every_one_of_several_hosts_counts() -> None:
    assert refusal({"headers": [(b"host", b"localhost"), (b"host", b"evil.example")]}, NAMES) is not None


@pytest.mark.parametrize(
    ("host", "origin", "expected"),
    [
        ("127.0.0.1:8430", "http://127.0.0.1:8430", None),
        ("127.0.0.1:8430", "http://localhost:3000", None),
        ("10.1.2.3:8430", "http://10.1.2.3:8430", None),
        ("gpu-node:8430", "https://trainer.example", None),
        ("127.0.0.1:8430", "https://evil.example", 403),
        ("127.0.0.1:8430", "http://203.0.113.9", 403),
        ("127.0.0.1:8430", "http://127.0.0.1.evil.example", 403),
        ("127.0.0.1:8430", "null", 403),
        ("127.0.0.1:8430", "", 403),
        ("127.0.0.1:8430", "http://[", 403),
    ],
)
def test_a_page_of_another_origin_is_refused(host: str, origin: str, expected: int | None) -> None:
    assert status(host, origin) == expected


def test_names_come_from_the_options_the_machine_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOSTS, " Proxy.example , ,trainer.polyreme.svc.")
    expected = {"reward.example", "0.0.0.0", "proxy.example", "trainer.polyreme.svc", socket.gethostname().lower()}
    assert own_names(["Reward.example", "0.0.0.0", ""]) == expected


def test_the_message_names_what_to_do() -> None:
    found = refusal({"headers": [(b"host", b"evil.example")]}, NAMES)
    assert found is not None and "'evil.example'" in found[1] and HOSTS in found[1]
