"""Which of the waiting sampling requests start together."""

import json
from pathlib import Path

from polyreme_rollout.local.sample_request import SampleRequest, admitted, fitting

A, B, C = Path("a"), Path("b"), Path("c")


def test_requests_start_while_their_adapters_have_room() -> None:
    assert admitted([A, B, C, A, None, B], set(), 2) == [0, 1, 3, 4, 5]
    assert admitted([B, C, A], {A}, 2) == [0, 2]
    assert admitted([None, None], set(), 0) == [0, 1]


def test_no_request_overtakes_the_first_for_ever() -> None:
    """Those of a, which run, would otherwise never end."""
    assert admitted([C, A, None], {A, B}, 2) == []
    assert admitted([A, C], {A, B}, 2) == [0]
    assert admitted([C, A], {B}, 2) == [0]


def test_requests_start_while_their_samples_have_room() -> None:
    """A larger one runs alone, and no later one overtakes it."""
    assert fitting([4, 4, 1], 0, 8) == 2
    assert fitting([4, 1], 5, 8) == 0
    assert fitting([3, 1], 5, 8) == 1
    assert fitting([20, 1], 0, 8) == 1
    assert fitting([20, 1], 1, 8) == 0
    assert fitting([], 0, 8) == 0


def test_a_saved_model_has_the_rank_of_its_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 6}))
    plain = {"prompt": [1], "samples": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop_ids": None, "stop_strings": []}
    for weights, rank in ((None, 0), (str(tmp_path), 0), (str(tmp_path / "adapter"), 6)):
        request = SampleRequest.unpack(json.dumps(plain | {"weights": weights, "prompt_logprobs": False}).encode())
        assert request.rank == rank
    for damaged in ("", "[]", "{}"):
        (tmp_path / "adapter" / "adapter_config.json").write_text(damaged)
        request = SampleRequest.unpack(
            json.dumps(plain | {"weights": str(tmp_path / "adapter"), "prompt_logprobs": False}).encode()
        )
        assert request.rank == 0
