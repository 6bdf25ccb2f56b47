"""A user's functions are tried on a synthetic batch, and errors name their wrong results."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.errors import ConfigError, RunFailedError
from polyreme_trainer.checks import _check_functions
from polyreme_trainer.megatron.training.own_algorithm import load_algorithm, synthetic_batch
from support.configs import ALGORITHM, run_config

LOSS = "def loss(inputs):\n    return {}\n"


def loaded(folder: Path, code: str, **algorithm: Any) -> Any:
    path = folder / "mine.py"
    path.write_text(code)
    section = AlgorithmConfig.model_validate({**(algorithm or ALGORITHM), "source": {"file": path}})
    return load_algorithm(run_config(folder, algorithm=section))


def test_an_episode_of_several_turns_may_be_longer_than_an_answer(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    answer, context = config.rollout.max_new_tokens, config.rollout.max_model_len
    single = load_algorithm(config)
    assert (single.longest, single.most) == (answer, answer)
    environment = EnvironmentConfig(file=tmp_path / "environment.py", max_turns=9)
    played = load_algorithm(run_config(tmp_path, reward=None, environment=environment))
    assert (played.longest, played.most) == (min(9 * answer, context), 9 * answer)


def test_a_function_replaces_the_recipe_s_own_and_all_else_stays(tmp_path: Path) -> None:
    algorithm = loaded(tmp_path, "def advantages(batch):\n    return 2.0 * batch.score[batch.sequence_of]\n")
    batch = synthetic_batch(algorithm, 2)
    result = algorithm.advantages(batch)
    np.testing.assert_allclose(result.advantages, 2 * batch.score[batch.sequence_of], rtol=1e-6)
    assert result.metrics["score"] == (pytest.approx(batch.score.sum()), len(batch))


def test_advantages_see_shaped_scores_and_the_kl_penalty(tmp_path: Path) -> None:
    code = "def advantages(batch):\n    return batch.score[batch.sequence_of] + batch.token_rewards\n"
    kl = {"place": "reward", "estimator": "k1", "coef": 0.5}
    algorithm = loaded(tmp_path, code, preset="reinforce_pp", kl=kl, shaping={"clip": [0.4, 0.6]})
    batch = synthetic_batch(algorithm, 2)
    assert batch.old is not None and batch.reference is not None
    expected = np.clip(batch.score, 0.4, 0.6)[batch.sequence_of] - 0.5 * (batch.old - batch.reference)
    np.testing.assert_allclose(algorithm.advantages(batch).advantages, expected, rtol=1e-5)


def test_a_loss_of_one_s_own_is_given_every_sequence(tmp_path: Path) -> None:
    algorithm = loaded(tmp_path, LOSS.format("(inputs.weight * inputs.logprobs).sum(), {}"))
    batch = synthetic_batch(algorithm, 2)
    advantages = algorithm.advantages(batch)
    advantages.advantages[:] = 0
    assert algorithm.has_gradient(batch, advantages).all()


def test_a_critic_s_returns_come_with_the_advantages(tmp_path: Path) -> None:
    algorithm = loaded(tmp_path, "def advantages(batch):\n    return batch.values, 2 * batch.values\n", preset="ppo")
    batch = synthetic_batch(algorithm, 1)
    result = algorithm.advantages(batch)
    np.testing.assert_array_equal(result.returns, 2 * result.advantages)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = 1\n", "neither"),
        ("def advantages(batch):\n    return batch.score\n", "shape (4,)"),
        ("def advantages(batch):\n    return batch.behaviour, batch.behaviour\n", "2"),
        ("def advantages(batch):\n    return batch.behaviour * float('nan')\n", "NaN"),
        ("def advantages(batch):\n    return batch.nothing\n", "AttributeError"),
        (LOSS.format("inputs.logprobs.sum()"), "Tensor"),
        (LOSS.format("inputs.logprobs, {}"), "shape"),
        (LOSS.format("inputs.old.sum(), {}"), "without gradient"),
        (LOSS.format("inputs.logprobs.sum() / 0, {}"), "inf"),
        (LOSS.format("inputs.logprobs.sum(), {'a': 1.0}"), "'a'"),
    ],
)
def test_what_is_wrong_is_found_on_the_synthetic_batch(code: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, code)
    assert found in error.value.found


def test_a_result_is_checked_in_every_iteration(tmp_path: Path) -> None:
    algorithm = loaded(
        tmp_path, "calls = []\ndef advantages(batch):\n    calls.append(1)\n    return batch.behaviour[len(calls) - 1:]\n"
    )
    with pytest.raises(RunFailedError):
        algorithm.advantages(synthetic_batch(algorithm, 2))


def test_the_digest_is_part_of_the_fingerprint_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LOSS.format("1"))
    first = AlgorithmConfig.model_validate({"source": {"file": path}})
    path.write_text(LOSS.format("2"))
    again, recorded = (
        AlgorithmConfig.model_validate({"source": {"file": path}}),
        AlgorithmConfig.model_validate(first.model_dump()),
    )
    assert recorded == first != again
    fingerprints = {run_config(tmp_path, algorithm=each).fingerprint() for each in (first, again)}
    assert len(fingerprints) == 2
    assert recorded.source is not None
    with pytest.raises(ConfigError):
        recorded.source.code()


@pytest.mark.parametrize(
    ("code", "count"), [("def loss(a, b):\n    pass\n", 1), ("def loss(a, b=1):\n    pass\n", 0), ("x = 1\n", 1)]
)
def test_the_check_before_a_run_reads_the_text_alone(code: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code + "raise SystemExit('it was run')\n")
    source = AlgorithmConfig.model_validate({"source": {"file": path}}).source
    assert source is not None
    assert len(list(_check_functions(source))) == count
