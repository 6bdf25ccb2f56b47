"""The tokens that the engine computes before sampling, for episodes that continue the exact tokens of their turns."""

import asyncio
from pathlib import Path
from typing import Any

from episodes_side.stack import configured
from rollout import with_tokenizer

from polyreme_rollout.engine.vllm import start
from polyreme_rollout.engine.vllm_arguments import CPU_BLOCK_TOKENS

TURNS, TOKENS, EPISODES = 4, 32, 8
MESSAGE = 256
"""Tokens of a message."""


async def prefill(engine: Any) -> tuple[float, float]:
    """Tokens computed before sampling over new ones, of episodes whose turns continue the exact tokens; and the least that blocks allow."""
    from vllm import SamplingParams

    async def cached(context: list[int], number: int, turn: int) -> tuple[int, list[int]]:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        outputs = [out async for out in engine.llm.generate({"prompt_token_ids": context}, params, f"{number}.{turn}")]
        return outputs[-1].num_cached_tokens or 0, list(outputs[-1].outputs[0].token_ids)

    async def episode(number: int) -> tuple[int, int, int]:
        context, computed, new, least, seen = [4 + number % 40] * 48, 0, 0, 0, 0
        for turn in range(TURNS):
            known, answer = await cached(context, number, turn)
            computed += len(context) - known
            new += len(context) - seen
            least += len(context) - max(0, seen - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
            context = [*context, *answer]
            seen, context = len(context), [*context, *((number * 7 + turn * 3 + k * k) % 40 + 4 for k in range(MESSAGE))]
        return computed, new, least

    await engine.open()
    found = await asyncio.gather(*(episode(number) for number in range(EPISODES)))
    computed, new, least = (sum(each) for each in zip(*found, strict=True))
    return computed / new, least / new


def prefill_alone(folder: Path, model: Path) -> dict[str, float]:
    """`prefill` on an engine of its own, which ends before the replica starts."""
    config = configured(folder, model, {"url": "http://127.0.0.1:1/run"})
    rollout = config.rollout.model_copy(update={"max_model_len": 2048})
    engine = start(config.model_copy(update={"rollout": rollout}), with_tokenizer(model, folder / "files"))
    try:
        ratio, floor = asyncio.run(prefill(engine))
    finally:
        engine.close()
    return {"prefill_vs_new": ratio, "prefill_floor": floor}
