"""A reward service in the test's own process."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from polyreme.api.v1 import reward_pb2_grpc
from polyreme.config.reward import RewardConfig
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme_reward.build import open_rewards
from polyreme_reward.items import Item
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.scorer import Scored, Scorer
from polyreme_reward.server import Addresses, serve

EXACT = {"name": "exact", "options": {"after": "#"}}


def reward_config(*rewards: dict[str, Any], **fields: Any) -> RewardConfig:
    return RewardConfig.model_validate({"rewards": list(rewards), "item_timeout": 60.0, "start_timeout": 600.0, **fields})


@asynccontextmanager
async def scoring(*rewards: dict[str, Any], **fields: Any) -> AsyncIterator[Scorer]:
    """The scorer of these rewards, without a server."""
    config, metrics = reward_config(*rewards, **fields), RewardMetrics()
    async with open_rewards(config, metrics) as opened:
        yield Scorer(opened, config.queue, metrics, config.choose_by, config.choices)


@asynccontextmanager
async def serving(
    *rewards: dict[str, Any], run: Run | None = None, **fields: Any
) -> AsyncIterator[tuple[reward_pb2_grpc.RewardServiceStub, httpx.AsyncClient, Addresses]]:
    """A whole service on free loopback ports, of a run or without one: its gRPC stub, an HTTP client of it, its addresses."""
    async with (
        serve(reward_config(*rewards, **fields), run=run) as addresses,
        rpc.connect(addresses.grpc) as channel,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", trust_env=False, timeout=300) as client,
    ):
        yield reward_pb2_grpc.RewardServiceStub(channel), client, addresses


def spelled(ids: Sequence[int]) -> list[str]:
    """The texts of token ids, which are code points."""
    return [chr(each) for each in ids]


def item(response: str, label: str = "3", key: str = "", tokens: bool = False, **fields: Any) -> Item:
    """An item, with a token for every character if `tokens`."""
    made = Item(key, fields.pop("prompt", "p"), response, label=label)._replace(**fields)
    return made._replace(token_ids=tuple(map(ord, response)), token_texts=tuple(response)) if tokens else made


def summary(answers: list[Scored]) -> list[tuple[str, float]]:
    return [(answer.status.name, answer.score) for answer in answers]
