"""vLLM's own schedulers with `OutputChunks`: every token of every request is delivered once, in order, and in few outputs."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_rollout.engine.protocol import CHUNK_TOKENS
from polyreme_rollout.engine.scheduler import IN_CHUNKS
from support.models import tiny_model
from support.vllm_scheduler import ROOMY, TIGHT, Engine, start_scheduler

pytestmark = [pytest.mark.real, pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")]  # it imports vLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("tied", tmp_path_factory.mktemp("model") / "model")


def delivered(engine: Engine, id: str) -> list[int]:
    """The tokens of a request, of which each output has the log-probabilities."""
    for output in engine.outputs[id]:
        ids, logprobs, ranks, *_ = output.new_logprobs
        assert ids[:, 0].tolist() == ranks.tolist() == output.new_token_ids
        assert logprobs[:, 0].tolist() == [-token for token in output.new_token_ids]
    return [token for output in engine.outputs[id] for token in output.new_token_ids]


@settings(max_examples=40, deadline=None)
@given(
    asynchronous=st.booleans(),
    blocks=st.integers(TIGHT, ROOMY),
    chunk=st.sampled_from([None, 8]),
    requests=st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(1, 60), st.booleans()), min_size=1, max_size=8
    ),
)
def test_any_load(
    model: Path, asynchronous: bool, blocks: int, chunk: int | None, requests: list[tuple[int, int, int, bool]]
) -> None:
    """Requests: steps before it, tokens of the prompt, tokens to sample, whether it asks for chunks."""
    engine = start_scheduler(model, blocks, asynchronous, chunk)
    for number, (before, prompt, new, in_chunks) in enumerate(requests):
        for _ in range(before):
            engine.step()
        engine.add(str(number), prompt, new, extra_args=IN_CHUNKS if in_chunks else None)
    for _ in range(10_000):
        if not engine.busy:
            break
        engine.step()
    for number, (_, _, new, in_chunks) in enumerate(requests):
        assert delivered(engine, str(number)) == list(range(1, new + 1))
        assert len(engine.outputs[str(number)]) == (-(-new // CHUNK_TOKENS) if in_chunks else new)
        assert [str(output.finish_reason) for output in engine.outputs[str(number)] if output.finish_reason] == ["length"]
    assert engine.scheduler.polyreme_held == {}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_aborted_request_delivers_no_more_and_leaves_nothing(model: Path, asynchronous: bool) -> None:
    from vllm.v1.request import RequestStatus

    engine = start_scheduler(model, ROOMY, asynchronous)
    for id in ("aborted", "other"):
        engine.add(id, 5, 40, extra_args=IN_CHUNKS)
    for _ in range(CHUNK_TOKENS + 5):
        engine.step()
    assert engine.scheduler.polyreme_held.keys() == {"aborted", "other"}
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    assert engine.scheduler.polyreme_held.keys() == {"other"}
    while engine.busy:
        engine.step()
    assert delivered(engine, "aborted") == list(range(1, CHUNK_TOKENS + 1))
    assert delivered(engine, "other") == list(range(1, 41))


def test_a_step_without_a_chunk_sends_nothing(model: Path) -> None:
    engine = start_scheduler(model, ROOMY, asynchronous=False)
    engine.add("a", 5, 40, extra_args=IN_CHUNKS)
    sent = [engine.step() for _ in range(40)]
    assert [place for place, messages in enumerate(sent, 1) if messages] == [CHUNK_TOKENS, 2 * CHUNK_TOKENS, 40]
