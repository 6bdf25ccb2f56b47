"""One number per token, over both native wires and from one server to another. The other wires have one number per response."""

import asyncio
import json
from pathlib import Path

import pytest

from polyreme.api.v1 import reward_pb2
from polyreme_reward.scorer import Scored
from support.raw_http import raw_server, reply
from support.rewards import EXACT, item, scoring, serving

STEPS = """
def reward(token_ids, token_texts, label):
    '''0.25 for each token that is a digit, and the length of the label over all.'''
    assert [chr(each) for each in token_ids] == token_texts
    return [0.25 * text.isdigit() for text in token_texts]
"""


@pytest.fixture
def steps(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "steps.py").write_text(STEPS)
    return {"file": str(tmp_path / "steps.py")}


def asked(response: str, tokens: bool = True) -> reward_pb2.ScoreItem:
    made = item(response, tokens=tokens)
    return reward_pb2.ScoreItem(prompt="p", response=response, label="3", token_ids=made.token_ids, token_texts=made.token_texts)


async def test_over_grpc(steps: dict[str, str]) -> None:
    async with serving({**steps, "weight": 2.0}, {**EXACT, "weight": -1.0}) as (stub, _, _):
        request = reward_pb2.ScoreRequest(items=[asked("1#3"), asked("a#3")])
        first, second = (await stub.Score(request, timeout=300)).results
        assert (first.score, list(first.token_rewards)) == (0.0, [0.5, 0.0, 0.5])  # the exact match belongs to the last token
        assert (second.score, list(second.token_rewards)) == (-0.5, [0.0, 0.0, 0.5])
        assert [(part.name, part.raw, part.weighted) for part in first.parts] == [("steps", 0.5, 1.0), ("exact", 1.0, -1.0)]
        listed = await stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=300)
        assert [info.reads_tokens for info in listed.rewards] == [True, False]


async def test_an_old_caller_that_sends_texts_alone_gets_a_status(steps: dict[str, str]) -> None:
    async with serving(steps, EXACT) as (stub, _, _):
        (result,) = (await stub.Score(reward_pb2.ScoreRequest(items=[asked("1#3", tokens=False)]), timeout=300)).results
        assert (result.status, result.score, list(result.token_rewards)) == (reward_pb2.SCORE_STATUS_ERROR, 0.0, [])
        assert "tokens" in result.message


async def test_an_old_server_answers_scalars(steps: dict[str, str]) -> None:
    """A server without such rewards answers a newer caller as before."""
    async with serving(EXACT) as (stub, _, _):
        (result,) = (await stub.Score(reward_pb2.ScoreRequest(items=[asked("1#3")]), timeout=300)).results
        assert (result.score, list(result.token_rewards)) == (1.0, [])
        old = reward_pb2.ScoreResult(key="k", status=reward_pb2.SCORE_STATUS_OK, score=1.0).SerializeToString()
        assert reward_pb2.ScoreResult.FromString(old).token_rewards == []
        assert not (await stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=300)).rewards[0].reads_tokens


async def test_over_http(steps: dict[str, str]) -> None:
    async with serving(steps, EXACT) as (_, client, _):
        items = [
            {"response": "1#3", "label": "3", "token_ids": [49, 35, 51], "token_texts": ["1", "#", "3"]},
            {"response": "1#3", "label": "3", "token_ids": [49, 35, 51]},
            {"response": "1#3", "label": "3"},
        ]
        good, textless, tokenless = (await client.post("/v1/score", json={"items": items})).json()["results"]
        assert (good["score"], good["token_rewards"]) == (1.5, [0.25, 0.0, 0.25])
        assert (textless["status"], textless["score"], textless["token_rewards"]) == ("error", None, None)
        assert "3 token_texts" in textless["message"] and "tokens" in tokenless["message"]
        listed = (await client.get("/v1/rewards")).json()["rewards"]
        assert [reward["reads_tokens"] for reward in listed] == [True, False]


async def test_one_server_behind_another_keeps_numbers_and_the_rest_of_the_score(steps: dict[str, str]) -> None:
    async with serving(steps, EXACT) as (_, _, inner):
        url = f"http://{inner.http}/v1/score"
        far = {"name": "far", "url": url, "protocol": "native", "weight": 2.0, "options": {"batch": 8, "tokens": True}}
        async with scoring(far) as scorer:
            assert scorer.rewards[0].reads_tokens
            (answer,) = await scorer.score([item("1#3", tokens=True)])
            assert (answer.score, answer.token_rewards) == (3.0, (0.5, 0.0, 0.5))
        async with scoring({**far, "options": {}}) as scorer:
            (answer,) = await scorer.score([item("1#3", tokens=True)])
            assert (answer.status.name, "tokens" in answer.message) == ("ERROR", True)


async def scored_by(tmp_path: Path, code: str, response: str = "abc") -> Scored:
    (tmp_path / "r.py").write_text(code)
    async with scoring({"file": str(tmp_path / "r.py")}) as scorer:
        (answer,) = await scorer.score([item(response, tokens=True)])
        return answer


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0, 2.0]", "expected 3 numbers, one per token; found 2"),
        ("[1.0, float('nan'), 2.0]", "token 1"),
        ("{'token_rewards': [1.0]}", "expected 3 numbers, one per token; found 1"),
        ("'abc'", "finite number"),
        ("[0.0] * 10_000_000", "found 10000000"),
    ],
)
async def test_a_wrong_answer_is_a_status_with_what_was_expected_and_found(tmp_path: Path, returned: str, message: str) -> None:
    answer = await scored_by(tmp_path, f"def reward(token_ids):\n    return {returned}\n")
    assert (answer.status.name, answer.score, answer.token_rewards) == ("INVALID", 0.0, ())
    assert message in answer.message


@pytest.mark.parametrize(
    "code",
    [
        "async def reward(token_texts):\n    return [float(t == 'b') for t in token_texts]\n",
        "def reward(item):\n    return {'score': [float(t == 'b') for t in item.token_texts], 'calls': 1}\n",
        "def reward(completions, completion_ids):\n    return [[float(i == 98) for i in completion_ids[0]]]\n",
        "import numpy as np\ndef reward(token_ids):\n    return (np.array(token_ids) == 98).astype(np.float32)\n",
    ],
)
async def test_functions_of_several_forms_answer_per_token(tmp_path: Path, code: str) -> None:
    answer = await scored_by(tmp_path, code)
    assert (answer.score, answer.token_rewards) == (1.0, (0.0, 1.0, 0.0)), answer.message


async def test_a_long_response_has_a_number_for_each_token(tmp_path: Path) -> None:
    answer = await scored_by(
        tmp_path, "def reward(token_ids):\n    return [i / 7 for i in range(len(token_ids))]\n", "a" * 20_000
    )
    assert answer.token_rewards == tuple(i / 7 for i in range(20_000)), answer.message


@pytest.mark.parametrize(
    ("protocol", "body"),
    [("paddlenlp", {"error_code": 0, "error_msg": "Success", "score": [[1, 0, 0]]}), ("openrlhf", {"rewards": [[1, 0, 0]]})],
)
async def test_a_foreign_server_that_answers_a_list_is_refused(protocol: str, body: dict[str, object]) -> None:
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(reply(json.dumps(body).encode()))

    async with raw_server(handler) as server, scoring({"name": "r", "url": server.url, "protocol": protocol}) as scorer:
        (answer,) = await scorer.score([item("abc", tokens=True)])
    assert answer.status.name == "INVALID" and "no tokens" in answer.message


async def test_a_foreign_caller_of_a_reward_per_token_is_refused_with_its_reason(steps: dict[str, str]) -> None:
    async with serving(steps) as (_, client, _):
        theirs = (await client.post("/", json={"src": ["p"], "tgt": ["3"], "response": ["1#3"]})).json()
        assert (theirs["error_code"], theirs["score"]) == (500, None) and "tokens" in theirs["error_msg"]
        other = await client.post("/get_reward", json={"query": ["p1#3"], "prompts": ["p"], "labels": ["3"]})
        assert other.status_code == 500 and "tokens" in other.json()["detail"]
