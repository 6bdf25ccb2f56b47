"""The ranks of a layout hold the whole model once for each data rank, and its optimizer's state once."""

import pytest

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.huggingface.families import find_family
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.rope import Rope
from polyreme_trainer.memory.sharding import shardings
from polyreme_trainer.memory.state import rank_parameters

UNTIED = Architecture(
    family=find_family("llama"),
    layers=4,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=64,
    head="untied",
    norm_eps=1e-6,
    max_position=16,
    rope=Rope(10000.0),
)


def test_stages_hold_the_model_together_and_the_first_has_most_micro_batches() -> None:
    every = list(shardings(UNTIED, ParallelConfig(pipeline=2, data=3)))
    assert sum(rank_parameters(UNTIED, sharding) for sharding in every) == UNTIED.parameters
    assert [sharding.micro_batches for sharding in every] == [2, 1]
    assert [(sharding.first, sharding.last) for sharding in every] == [(True, False), (False, True)]
    assert {sharding.optimizer_ranks for sharding in every} == {3}
    [shared] = shardings(UNTIED, ParallelConfig(context=2, data=3))
    assert (shared.optimizer_ranks, shared.context_ranks) == (6, 2)


def test_virtual_stages_keep_more_micro_batches_of_fewer_layers() -> None:
    """Before its first gradient, a stage starts two micro-batches per later stage, and one per stage and further virtual stage."""
    every = list(shardings(UNTIED, ParallelConfig(pipeline=2, virtual_pipeline=2)))
    assert sum(rank_parameters(UNTIED, sharding) for sharding in every) == UNTIED.parameters
    assert [(sharding.micro_batches, sharding.layers(UNTIED)) for sharding in every] == [(5, 1), (3, 1)]


@pytest.mark.parametrize("stages", [3, 10**9])
def test_stages_that_do_not_divide_the_layers_are_an_error(stages: int) -> None:
    with pytest.raises(ValueError, match=f"{stages} pipeline stages"):
        rank_parameters(UNTIED, next(shardings(UNTIED, ParallelConfig(pipeline=stages))))
