"""Which machine of the learner holds which tensors of a version."""

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.versions.version_writer import machine_of, plan_parts


def test_stages_and_expert_ranks_give_each_machine_a_part() -> None:
    stages = [{"embed", "layers.0"}, {"layers.0"}, {"layers.1", "norm"}, {"layers.1"}]  # two tensor ranks each
    assert plan_parts(stages, 2) == [{"embed", "layers.0"}, {"layers.1", "norm"}]
    assert plan_parts(stages, 1) == [{"embed", "layers.0", "layers.1", "norm"}]
    assert [machine_of(rank, 4, 2) for rank in range(4)] == [0, 0, 1, 1]


def test_machines_with_copies_have_no_part() -> None:
    assert plan_parts([{"embed", "expert.0"}, {"expert.1"}, set(), set()], 2) == [{"embed", "expert.0", "expert.1"}]


def test_a_tensor_cut_over_machines_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_parts([{"embed", "expert.0"}, {"expert.0"}], 2)
    assert "expert.0" in caught.value.found
