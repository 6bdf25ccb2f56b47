"""`polyreme chat`: a conversation with a policy in the terminal.

Invariant: questions are read from the terminal, from --message, or from a pipe, one per line; answers go to the output as they
are generated. A conversation changes no run.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from polyreme.cli.chat.chat_target import ChatTarget, find_target, served
from polyreme.cli.chat.v1_client import Chat, Piece, RequestRefusedError, V1Client
from polyreme.config.security import EndpointSecurity
from polyreme.display.report import shortened
from polyreme.errors import ConfigError, PolyremeError
from polyreme.terminal.progress_bar import waiting
from polyreme.terminal.terminal import harmless

_NEW, _QUIT = "/new", "/quit"


@dataclass
class Dialogue:
    """A conversation with one model.

    Attributes:
        target, client, model: the target, the client of its server, and the model's name there.
        messages: the conversation so far.
    """

    target: ChatTarget
    client: V1Client
    model: str
    messages: Chat = field(default_factory=list)

    def ask(self, question: str, max_tokens: int | None, temperature: float) -> Iterator[Piece]:
        """Streams the answer and keeps it for the next question. A text model sees only the question.

        Without `max_tokens`, an answer may be as long as the target's, or fill the rest of the model's context if that is less.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        for piece in self._fitting(asked, max_tokens, temperature):
            answer += piece.text
            yield piece
        if self.target.is_chat:
            self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _fitting(self, asked: Chat, max_tokens: int | None, temperature: float) -> Iterator[Piece]:
        begun = False
        try:
            for piece in self._answer(asked, max_tokens or self.target.max_tokens, temperature):
                begun = True
                yield piece
        except RequestRefusedError:  # perhaps the context has no room for so many tokens
            if begun or max_tokens is not None:
                raise
            yield from self._answer(asked, None, temperature)

    def _answer(self, asked: Chat, max_tokens: int | None, temperature: float) -> Iterator[Piece]:
        if not self.target.is_chat:
            return self.client.complete(self.model, asked[-1]["content"], max_tokens, temperature)
        system = [{"role": "system", "content": self.target.system}] if self.target.system else []
        return self.client.chat(self.model, [*system, *asked], max_tokens, temperature)


def chat(
    target: Annotated[str, typer.Argument(help="A run directory, a Hugging Face directory, or the URL of a /v1.")],
    message: Annotated[list[str] | None, typer.Option("--message", "-m", help="Ask this, then end. Repeatable.")] = None,
    compare: Annotated[
        int | None,
        typer.Option(
            min=0, help="Also ask this version: an export of the run, or a version of a gateway. Its answer comes second."
        ),
    ] = None,
    token_env: Annotated[str | None, typer.Option(help="Environment variable with the token of a URL.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file with the CA certificates of a URL. Default: the system's.", show_default=False)
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System message; '' for none. Default: that of the configuration or of its training rows.", show_default=False
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum length of an answer. Default: the run's.")] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0: the most likely answer.")] = 0.0,
) -> None:
    """Talk to the policy of a run or a stage, live or exported, or to a model directory."""
    access = EndpointSecurity(ca=ca, token_env=token_env) if ca or token_env else None
    versions = [None] if compare is None else [None, compare]
    targets = [find_target(target, version, access, system) for version in versions]
    if targets[0].system and system is None:
        print(f"system message: {shortened(targets[0].system)}", file=sys.stderr)
    with ExitStack() as servers:
        conversations = []
        for each in targets:
            with nullcontext() if each.model_dir is None else waiting(f"loading {each.model_dir}"):
                url = servers.enter_context(served(each))
            client = V1Client(url, each.security)
            name = client.model() if each.version is None else f"{client.model()}@{each.version}"
            conversations.append(Dialogue(each, client, name))
        if not message and sys.stdin.isatty():
            print(f"{_NEW} starts a new conversation, {_QUIT} ends it", file=sys.stderr)
        for question in message or _questions():
            if question == _NEW:
                for conversation in conversations:
                    conversation.messages = []
                continue
            for conversation in conversations:
                _answer(conversation, question, max_tokens, temperature, len(targets) > 1)


def _questions() -> Iterator[str]:
    """Yields the non-empty lines of the input until its end or _QUIT."""
    while True:
        try:
            line = input("you> ") if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip() == _QUIT or (not line and not sys.stdin.isatty()):
            return
        if line.strip():
            yield line.strip()


def _answer(conversation: Dialogue, question: str, max_tokens: int | None, temperature: float, named: bool) -> None:
    """Prints an answer as it arrives. An interrupt ends the answer, not the conversation."""
    version, begun = "", False
    try:
        with suppress(KeyboardInterrupt):
            for piece in conversation.ask(question, max_tokens, temperature):
                version = piece.version or version
                if named and not begun:
                    title = conversation.target.title
                    print(f"{title}{f' at version {version}' if version and conversation.target.url else ''}> ", end="")
                begun = True
                print(harmless(piece.text), end="", flush=True)
        print(flush=True)
    except PolyremeError as error:
        if isinstance(error, ConfigError) or not sys.stdin.isatty():
            raise
        print(f"\n{error}", file=sys.stderr)  # the user may ask again
