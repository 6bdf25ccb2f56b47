"""The client of /v1 against a streaming server, and the targets of `polyreme chat`."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polyreme.cli.chat.chat_target import find_target
from polyreme.cli.chat.v1_client import Piece, RequestRefusedError, V1Client
from polyreme.cli.main import build_app
from polyreme.config.run import RunConfig
from polyreme.config.security import EndpointSecurity
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError, PolyremeError, UnavailableError
from polyreme.rundir.run_directory import owned
from support.configs import run_config
from support.one_reply import one_reply
from support.recorded_run import record_run
from support.stages import prepared, stage_config, write_data, write_model


class EchoServer:
    """A /v1 that streams the words of a question backwards. A question of one word is refused, as more than `most` tokens are; "break" ends the stream, "cut" leaves its end out."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.most = 1000
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.tokens.append(self.headers.get("authorization"))
                self._reply(200, json.dumps({"data": [{"id": "letters"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                server.asked.append(body)
                question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
                if len(question.split()) == 1 or body.get("max_tokens", 0) > server.most:
                    return self._reply(400, json.dumps({"error": {"message": "one word"}}).encode())
                lines = [self._event(word, "messages" in body) for word in reversed(question.split())]
                if "break" in question:
                    lines = [b'data: {"error": {"message": "the engine has died"}}\n\n']
                self._reply(200, b"".join([*lines, b": a comment\n", b"" if "cut" in question else b"data: [DONE]\n\n"]))

            def _event(self, word: str, chat: bool) -> bytes:
                choice = {"delta": {"content": f"{word} "}} if chat else {"text": f"{word} "}
                return b"data: " + json.dumps({"choices": [choice], "system_fingerprint": "policy-7-8"}).encode() + b"\n\n"

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    found = EchoServer()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def test_a_proxy_of_the_environment_is_not_asked(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert V1Client(echo.url).model() == "letters"


def test_an_answer_is_streamed_with_its_version(echo: EchoServer) -> None:
    pieces = list(V1Client(echo.url).chat("letters", [{"role": "user", "content": "a b"}], 8, 0.0))
    assert pieces == [Piece("b ", "7-8"), Piece("a ", "7-8")]
    assert [piece.text for piece in V1Client(echo.url).complete("letters", "a b", 8, 0.5)] == ["b ", "a "]
    assert echo.asked[1] == {"model": "letters", "prompt": "a b", "max_tokens": 8, "temperature": 0.5, "stream": True}


def test_refusals_and_lost_servers_are_errors(echo: EchoServer) -> None:
    client = V1Client(echo.url)
    with pytest.raises(PolyremeError) as refused:
        list(client.complete("letters", "a", 8, 0.0))
    assert "400" in refused.value.found and "one word" in refused.value.found
    with pytest.raises(PolyremeError) as broken:
        list(client.complete("letters", "break it", 8, 0.0))
    assert "died" in broken.value.found
    with pytest.raises(UnavailableError):
        V1Client("http://127.0.0.1:1/v1", timeout=60).model()


def test_the_token_is_sent(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_TOKEN", "secret")
    V1Client(echo.url, EndpointSecurity(token_env="CHAT_TOKEN")).model()
    assert echo.tokens == ["Bearer secret"]


def test_a_url_has_a_token_and_versions(echo: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAT_TOKEN", "secret")
    words = ["chat", echo.url, "--token-env", "CHAT_TOKEN", "--compare", "3", "-m", "a b"]
    result = CliRunner().invoke(build_app(["chat"]), words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"{echo.url} at version 7-8> b a ", "version 3 at version 7-8> b a "]
    assert [asked["model"] for asked in echo.asked] == ["letters", "letters@3"]
    assert set(echo.tokens) == {"Bearer secret"}


def test_a_conversation_remembers_and_can_begin_anew(echo: EchoServer) -> None:
    result = CliRunner().invoke(
        build_app(["chat"]), ["chat", echo.url], input="one two\n\nthree four\n/new\nfive six\n/quit\nnot asked\n"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == ["two one ", "four three ", "six five "]
    histories = [[message["content"] for message in asked["messages"]] for asked in echo.asked]
    assert histories == [["one two"], ["one two", "two one ", "three four"], ["five six"]]


def test_messages_of_the_command_line(echo: EchoServer) -> None:
    result = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "-m", "a b", "-m", "c d", "--max-tokens", "3"])
    assert result.stdout.splitlines() == ["b a ", "d c "]
    assert [asked["max_tokens"] for asked in echo.asked] == [3, 3]
    failed = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "-m", "one"])
    assert isinstance(failed.exception, PolyremeError)


def test_a_live_run_is_its_replica_and_an_ended_one_its_newest_export(tmp_path: Path) -> None:
    run_dir = record_run(tmp_path, end=None)
    with owned(run_dir):
        live = find_target(str(run_dir))
    assert (live.url, live.model_dir, live.max_tokens) == ("http://127.0.0.1:2/v1", None, 32)
    with pytest.raises(ConfigError):
        find_target(str(run_dir))  # no process, no export
    for version in (8, 16):
        (run_dir / "hf" / f"iteration-{version:06d}").mkdir(parents=True)
        (run_dir / "hf" / f"iteration-{version:06d}" / "config.json").write_text("{}")
    assert find_target(str(run_dir)).model_dir == run_dir / "hf" / "iteration-000016"
    export = find_target(str(run_dir), 8)
    assert (export.title, export.max_tokens) == ("iteration-000008", 32)
    assert find_target(str(export.model_dir)).max_tokens == 32
    with pytest.raises(ConfigError) as error:
        find_target(str(run_dir), 9)
    assert error.value.found == "iteration-000008, iteration-000016"


def test_a_place_that_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        find_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert find_target(str(tmp_path)).model_dir == tmp_path
    with pytest.raises(ConfigError):
        find_target(str(tmp_path), 3)


def test_an_answer_fits_a_context_smaller_than_its_usual_length(echo: EchoServer) -> None:
    echo.most = 100
    result = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "-m", "a b"])
    assert result.exit_code == 0 and result.stdout.splitlines() == ["b a "]
    assert [asked.get("max_tokens") for asked in echo.asked] == [512, None]
    refused = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "-m", "a b", "--max-tokens", "200"])
    assert isinstance(refused.exception, RequestRefusedError), "a length that was asked for is not changed"


def export_of(config: StageConfig | RunConfig, name: str, **fields: Any) -> Path:
    """A directory with the files of an export that chat reads."""
    if isinstance(config, StageConfig):
        prepared(config)
    export = config.run_dir / "hf" / name
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps(fields))
    return export


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_the_result_of_a_stage_is_asked_as_it_was_trained(tmp_path: Path, stage: str) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    config = stage_config(tmp_path, stage, data__system="Be brief.")
    export = export_of(config, "final")
    for place in (config.run_dir, export):
        found = find_target(str(place))
        assert (found.model_dir, found.system, found.is_chat, found.security) == (export, "Be brief.", True, None)
    plain = stage_config(tmp_path, stage, name="plain", data__template="none")
    assert not find_target(str(export_of(plain, "final"))).is_chat


def test_a_reward_model_is_refused_with_what_it_can_do(tmp_path: Path) -> None:
    write_data(tmp_path)
    write_model(tmp_path)
    config = stage_config(tmp_path, "reward-model")
    export = export_of(config, "final", architectures=["Qwen2ForSequenceClassification"])
    for place in (config.run_dir, export):
        with pytest.raises(ConfigError) as error:
            find_target(str(place))
        assert "reward model" in error.value.found and f"model: {export}" in error.value.do and "reward test" in error.value.do


def test_the_system_message_of_the_rows_is_used(tmp_path: Path, echo: EchoServer) -> None:
    def rows(*systems: str) -> None:
        lines = [[{"role": "system", "content": text}, {"role": "user", "content": "a b"}] for text in systems]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))

    config = run_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    export = str(export_of(config, "iteration-000001"))
    assert find_target(export).system is None, "the rows are gone"
    rows("Reply in capitals.", "Reply in capitals.", "Be brief.")
    assert find_target(export).system == "Reply in capitals."
    assert find_target(export, system="Other.").system == "Other."
    assert find_target(export, system="").system is None
    result = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "--system", "Other.", "-m", "a b", "--max-tokens", "9"])
    assert result.exit_code == 0, result.output
    assert echo.asked[-1]["messages"][0] == {"role": "system", "content": "Other."}


def test_the_system_message_of_whole_conversations_is_used(tmp_path: Path) -> None:
    write_model(tmp_path)
    messages = [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    config = stage_config(tmp_path, "sft", data__eval=None)
    assert find_target(str(export_of(config, "final"))).system == "Be kind."


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.0 200 OK\r\n\r\n<html>",
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"-ERR no HTTP\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_a_server_that_is_no_v1_is_an_error(reply: bytes) -> None:
    with one_reply(reply) as address, pytest.raises(PolyremeError):
        V1Client(f"http://{address}").model()


def test_an_answer_without_its_end_is_an_error(echo: EchoServer) -> None:
    with pytest.raises(UnavailableError):
        list(V1Client(echo.url).complete("letters", "cut off", 8, 0.0))


def test_an_answer_cannot_command_the_terminal(echo: EchoServer) -> None:
    result = CliRunner().invoke(build_app(["chat"]), ["chat", echo.url, "-m", "\x1b]52;c;aGk=\x07 \u202e\u200dä"])
    assert result.stdout == "\\u202e\u200dä \\x1b]52;c;aGk=\\x07 \n"


@pytest.mark.parametrize("url", ["http://localhost:port/v1", "http://local host/v1", "http://[::1/v1"])
def test_an_address_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(UnavailableError):
        V1Client(url).model()
