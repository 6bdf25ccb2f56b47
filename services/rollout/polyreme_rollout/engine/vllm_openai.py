"""The OpenAI-compatible /v1 of the vLLM engine: vLLM's own HTTP application on the engine of this process.

Invariant: every request carries the salt of the served weights, and none is urgent (see `ReservedSlot`): a negative priority
counts as 0. A request that cannot be answered gets an error of its own (400), and is never a failure of the server (500).
"""

import asyncio
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI

from polyreme.dataset.chat import clock_of

TIMEOUT = 60.0  # to build vLLM's application


async def make_openai_app(
    llm: object, served_name: str, salt: Callable[[], Awaitable[str]], day: datetime.date | None = None
) -> FastAPI:
    """See `InferenceEngine.openai_app`. `llm` is the AsyncLLM; `day` is `data.date`."""
    client = _Client(llm, salt)
    return await asyncio.to_thread(_build, client, served_name, asyncio.get_running_loop(), day)


class _Client:
    """AsyncLLM as vLLM's HTTP application uses it."""

    def __init__(self, llm: Any, salt: Callable[[], Awaitable[str]]) -> None:
        self._llm, self._salt = llm, salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, *arguments: Any, priority: int = 0, **keywords: Any
    ) -> AsyncIterator[Any]:
        """Raises ValueError, which vLLM answers with 400: no token of the vocabulary fits the requested format."""
        salt = await self._salt()
        if isinstance(prompt, dict):
            prompt = {**prompt, "cache_salt": f"{salt} {prompt.get('cache_salt') or ''}"}
        else:  # older releases pass a finished request
            prompt.cache_salt = f"{salt} {prompt.cache_salt or ''}"
        outputs = self._llm.generate(prompt, sampling_params, *arguments, priority=max(0, priority), **keywords)
        try:
            async for output in outputs:
                if sampling_params.structured_outputs and any(choice.finish_reason == "error" for choice in output.outputs):
                    raise ValueError(
                        "expected a format that the model's vocabulary can write; found one that needs a token it lacks. "
                        "Fix: ask for a response_format or structured_outputs of characters that the model's tokenizer has."
                    )
                yield output
        finally:
            await outputs.aclose()


def _build(llm: Any, served_name: str, loop: asyncio.AbstractEventLoop, day: datetime.date | None) -> FastAPI:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # older releases
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found, no-redef]

    # The engine has its model and tokenizer already; this path is what /v1/models shows as `root`.
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", served_name])
    if day is not None:  # a chat template gets it as a variable, which hides the function of this name
        arguments.default_chat_template_kwargs = {"strftime_now": clock_of(day)}
    app: FastAPI = build_app(arguments, ("generate",), llm.model_config)
    making = asyncio.run_coroutine_threadsafe(init_app_state(llm, app.state, arguments, ("generate",)), loop)
    try:
        making.result(TIMEOUT)
    finally:
        making.cancel()  # has no effect once it is done
    return app
