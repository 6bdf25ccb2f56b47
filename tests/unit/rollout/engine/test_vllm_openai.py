"""Requests of /v1 on their way to vLLM."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from polyreme_rollout.engine.vllm_openai import _Client


class Asked:
    """Records what it is asked, in the place of AsyncLLM."""

    def __init__(self) -> None:
        self.prompt: Any = None
        self.options: dict[str, Any] = {}

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, **options: Any) -> AsyncIterator[Any]:
        self.prompt, self.options = prompt, options
        yield SimpleNamespace(outputs=[])


async def salt() -> str:
    return "1.7.0"


@pytest.mark.parametrize(("priority", "passed"), [(None, 0), (-3, 0), (0, 0), (4, 4)])
async def test_no_request_is_as_urgent_as_the_canary(priority: int | None, passed: int) -> None:
    llm, sampling = Asked(), SimpleNamespace(structured_outputs=None)
    options = {} if priority is None else {"priority": priority}
    async for _ in _Client(llm, salt).generate({"prompt_token_ids": [1]}, sampling, "cmpl-1", trace_headers=None, **options):
        pass
    assert llm.options == {"priority": passed, "trace_headers": None}
    assert llm.prompt == {"prompt_token_ids": [1], "cache_salt": "1.7.0 "}
