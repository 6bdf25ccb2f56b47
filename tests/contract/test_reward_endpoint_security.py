"""An HTTP reward behind TLS with a private CA, client certificates and a token: requests succeed, and failures name the problem."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.load import load_reward_config
from polyreme.config.reward import RewardSpec
from polyreme.errors import ConfigError
from support.certificates import Issued, issue
from support.raw_http import RawServer, raw_server, reply
from support.rewards import item, scoring, summary

TOKEN = "s3cret-token"
VARIABLE = "POLYREME_TEST_ENDPOINT_TOKEN"
GOOD = reply(b'{"error_code":0,"error_msg":"Success","score":[1.0]}')


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issued:
    monkeypatch.setenv(VARIABLE, TOKEN)
    return issue(tmp_path / "ours")


@asynccontextmanager
async def guarded(ours: Issued, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> AsyncIterator[RawServer]:
    """A PaddleNLP server that requires a certificate of the test's CA and the token."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ours.ca)
    context.load_cert_chain(ours.certificate, ours.key)
    context.verify_mode, context.maximum_version = ssl.CERT_REQUIRED, version

    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        known = f"\r\nauthorization: Bearer {TOKEN}\r\n".encode() in seen.heads[-1]
        writer.write(GOOD if known else reply(b'{"detail":"who are you?"}', "401 Unauthorized"))

    async with raw_server(handler, context) as seen:
        yield seen


def shown(ours: Issued, **fields: object) -> dict[str, object]:
    """A `security` section with everything that the guarded server requires, changed by `fields`."""
    section = {**ours.section(), "token_env": VARIABLE, **fields}
    return {name: value for name, value in section.items() if value is not None}


async def ask(url: str, security: dict[str, object] | None, **options: Any) -> tuple[str, str]:
    """Status and message of one item."""
    reward = {"name": "far", "url": url, "protocol": "paddlenlp", "security": security, "options": options}
    async with scoring(reward, item_timeout=60.0) as scorer:
        (answer,) = await scorer.score([item("r")])
        assert TOKEN not in answer.message and TOKEN not in scorer.rewards[0].version + scorer.rewards[0].description
        return answer.status.name, answer.message


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_certificate_and_token_are_shown_over_kept_connections(ours: Issued, version: ssl.TLSVersion) -> None:
    async with guarded(ours, version) as server:
        reward = {"url": server.url, "protocol": "paddlenlp", "security": shown(ours), "options": {"concurrency": 2}}
        async with scoring(reward) as scorer:
            assert summary(await scorer.score([item("r")] * 20)) == [("OK", 1.0)] * 20
        assert server.connections <= 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_the_message_names_the_problem(ours: Issued, tmp_path: Path, version: ssl.TLSVersion) -> None:
    stranger = issue(tmp_path / "stranger")
    wrong = {
        "self-signed certificate in certificate chain": shown(ours, ca=str(stranger.ca)),
        "this system, without `security.ca`": shown(ours, ca=None),
        "set `security.certificate` and `security.key`": shown(ours, certificate=None, key=None),
        f"does not accept the certificate in `security.certificate` ({stranger.certificate})": shown(
            ours, certificate=str(stranger.certificate), key=str(stranger.key)
        ),
        "set `security.token_env`": shown(ours, token_env=None),
    }
    async with guarded(ours, version) as server:
        for said, security in wrong.items():
            status, message = await ask(server.url, security, tries=2)
            assert (status, said in message) == ("ERROR", True), message
        status, message = await ask(server.url.replace("127.0.0.1", "localhost"), shown(ours))
        assert (status, "Hostname mismatch" in message) == ("ERROR", True), message
        assert (await ask(server.url, shown(ours)))[0] == "OK"


async def test_a_wrong_token_is_reported_by_its_variable(ours: Issued, monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded(ours) as server:
        monkeypatch.setenv(VARIABLE, "another")
        status, message = await ask(server.url, shown(ours))
        assert (status, f"the token in ${VARIABLE}" in message) == ("ERROR", True), message
        assert "another" not in message


async def test_a_server_without_tls_is_reported(ours: Issued) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(reply(b"what?", "400 Bad Request"))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        status, message = await ask("https://127.0.0.1:{1}/".format(*server.sockets[0].getsockname()), shown(ours))
    assert (status, "http://" in message) == ("ERROR", True), message


async def test_why_an_endpoint_is_left_alone_stays_in_the_message(ours: Issued) -> None:
    async with guarded(ours) as server:
        reward = {"url": server.url, "protocol": "paddlenlp", "security": shown(ours, ca=None)}
        async with scoring(reward) as scorer:
            answers = [(await scorer.score([item("r")]))[0] for _ in range(4)]
    assert "next probe" in answers[-1].message and "without `security.ca`" in answers[-1].message


async def test_one_of_several_that_is_not_trusted_does_no_harm(ours: Issued, tmp_path: Path) -> None:
    stranger = issue(tmp_path / "stranger")
    async with guarded(ours) as server, guarded(stranger) as other:
        reward = {"name": "r", "url": [other.url, server.url], "protocol": "paddlenlp", "security": shown(ours)}
        async with scoring(reward) as scorer:
            assert summary(await scorer.score([item("r")] * 20)) == [("OK", 1.0)] * 20


@pytest.mark.parametrize(
    ("spoil", "fields", "said"),
    [
        (lambda ours: ours.ca.unlink(), {}, "found no file .*ca.pem"),
        (lambda ours: ours.key.write_text("no PEM"), {}, "matching PEM files"),
        (lambda ours: None, {"token_env": "POLYREME_TEST_UNSET"}, "POLYREME_TEST_UNSET; found none"),
    ],
    ids=["no ca", "no key", "no token"],
)
async def test_what_cannot_be_used_is_one_error_at_start(ours: Issued, spoil, fields: dict[str, object], said: str) -> None:
    spoil(ours)
    with pytest.raises(ConfigError, match=said):
        await ask("https://127.0.0.1:1/", shown(ours, **fields))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"url": "http://h/", "protocol": "native", "security": {}}, "https://"),
        ({"url": ["https://h/", "http://h/"], "protocol": "native", "security": {"token_env": "T"}}, "https://"),
        ({"name": "exact", "security": {"token_env": "T"}}, "https://"),
        ({"url": "https://h/", "protocol": "native", "security": {"certificate": "a.pem"}}, "go together"),
        ({"url": "https://h/", "protocol": "native", "security": {"token": "abc"}}, "Extra inputs"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(spec: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardSpec.model_validate(spec)


def test_its_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rewards.yaml"
    path.write_text(
        "reward: {rewards: [{url: 'https://h/', protocol: native, security: {ca: a.pem, certificate: b/c.pem, key: ~/k.pem}}, {model: rm}]}"
    )
    far, model = load_reward_config(path).rewards
    assert far.security is not None
    assert (far.security.ca, far.security.certificate) == (tmp_path / "a.pem", tmp_path / "b" / "c.pem")
    assert (far.security.key, model.model) == (Path("~/k.pem").expanduser(), tmp_path / "rm")
