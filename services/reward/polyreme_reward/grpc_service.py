"""RewardService over gRPC, the native protocol."""

from typing import NoReturn

import grpc

from polyreme import API_VERSION
from polyreme.api.v1 import experience_pb2, reward_pb2, reward_pb2_grpc
from polyreme_reward.items import Item
from polyreme_reward.scorer import BadBatch, RequestRejected, Scorer

NAME: str = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Serves Score and ListRewards for one Scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers this servicer with a server."""
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self, server)

    async def Score(self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext) -> reward_pb2.ScoreResponse:
        items = [
            Item(
                i.key,
                i.prompt,
                i.response,
                i.response_raw,
                i.label or None,
                i.metadata_json,
                i.templated_prompt,
                tuple(i.token_ids),
                tuple(i.token_texts),
                i.messages_json,
            )
            for i in request.items
        ]
        try:
            scored = await self._scorer.score(items)
        except BadBatch as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, error)
        except RequestRejected as error:
            code = grpc.StatusCode.UNAVAILABLE if error.draining else grpc.StatusCode.RESOURCE_EXHAUSTED
            await _abort(context, code, error, (("retry-after-ms", str(int(error.retry_after * 1000))),))
        new_result, new_part = reward_pb2.ScoreResult, experience_pb2.RewardPart
        results = [
            new_result(
                key=item.key,
                status=answer.status,  # type: ignore[arg-type]
                score=answer.score,
                parts=[new_part(name=n, raw=r, weighted=w, plugin_version=v) for n, r, w, v in answer.parts],
                message=answer.message,
                token_rewards=answer.token_rewards,
            )
            for item, answer in zip(items, scored, strict=True)
        ]
        return reward_pb2.ScoreResponse(results=results)

    async def ListRewards(
        self, request: reward_pb2.ListRewardsRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListRewardsResponse:
        infos = [
            reward_pb2.RewardInfo(
                name=r.name,
                weight=r.weight,
                version=r.version,
                description=r.description,
                correctness=r.correctness,
                reads_tokens=r.reads_tokens,
            )
            for r in self._scorer.rewards
        ]
        return reward_pb2.ListRewardsResponse(api=API_VERSION, rewards=infos)


async def _abort(
    context: grpc.aio.ServicerContext, code: grpc.StatusCode, error: Exception, metadata: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    await context.abort(code, str(error), metadata)
    raise AssertionError("abort returned")
