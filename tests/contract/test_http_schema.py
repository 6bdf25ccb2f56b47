"""Every route answers any request according to its OpenAPI document, without undocumented errors."""

import grpc
from grpc_health.v1 import health_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyreme.api.v1 import reward_pb2
from polyreme.net import rpc
from polyreme_reward.http_api import make_app
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.rules import make_rule
from polyreme_reward.rules.reward import RuleReward
from polyreme_reward.scorer import Scorer
from support.rewards import EXACT, serving


def application():
    metrics = RewardMetrics()
    rewards = [RuleReward(name, 1.0, "v", "", make_rule(name, {})) for name in ("exact", "length")]
    return make_app(Scorer(rewards, 1024, metrics), metrics, ["<eos>"], [True])


# Lists of different lengths are refused, which JSON schema cannot express. A documented 5xx is allowed; undocumented statuses still fail.
EXCLUDED = ("positive_data_acceptance", "not_a_server_error")
METHODS = {
    "polyreme.api.v1.RewardService/Score": reward_pb2.ScoreResponse,
    "polyreme.api.v1.RewardService/ListRewards": reward_pb2.ListRewardsResponse,
    "grpc.health.v1.Health/Check": health_pb2.HealthCheckResponse,
}


def test_every_route_answers_as_documented() -> None:
    import schemathesis  # imported here instead of its pytest plugin, whose import takes longer than the collection of a hundred test files

    schemathesis.checks.load_all_checks()
    excluded = [schemathesis.checks.CHECKS.get_one(name) for name in EXCLUDED]
    routes = [found.ok() for found in schemathesis.openapi.from_asgi("/openapi.json", application()).get_all_operations()]
    assert {route.path for route in routes} > {"/v1/score", "/health"}
    for route in routes:
        for mode in schemathesis.GenerationMode if route.body else [schemathesis.GenerationMode.POSITIVE]:

            @settings(max_examples=settings.default.max_examples // 4, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=route.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(excluded_checks=excluded)

            check()


@settings(max_examples=settings.default.max_examples // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=st.lists(st.tuples(st.sampled_from(sorted(METHODS)), st.binary(max_size=300)), min_size=1, max_size=20))
async def test_random_bytes_on_the_protobuf_surface(junk: list[tuple[str, bytes]]) -> None:
    async with serving(EXACT) as (stub, _, addresses):
        async with rpc.connect(addresses.grpc) as channel:
            for method, data in junk:
                try:
                    METHODS[method].FromString(await channel.unary_unary(f"/{method}")(data, timeout=300))
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), error
        item = reward_pb2.ScoreItem(response="#3", label="3")
        assert (await stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=300)).results[0].score == 1.0
