"""The padding of evenly spread lengths, which the estimate of memory counts. test_packing.py has the plan's cost and the blocks."""

import numpy as np
import pytest
import torch

from polyreme_trainer.megatron.batches.attention_blocks import plan_blocks, spread_positions
from polyreme_trainer.megatron.batches.attention_layout import cut_blocks


@pytest.mark.parametrize("features", [64, 896, 8192])
def test_positions_are_those_of_the_blocks_that_attention_runs(features: int) -> None:
    lengths = np.linspace(300, 1, 14).round().astype(np.int64)
    blocks = cut_blocks(lengths, plan_blocks(lengths, features), torch.device("cpu"))
    positions, tokens = spread_positions(2100, 300, features)
    assert (positions, tokens) == (sum(rows * width for rows, width in blocks.shapes), len(blocks.scatter))
    assert tokens == pytest.approx(2100, rel=0.02)


def test_wide_models_pad_less_and_one_sequence_never_does() -> None:
    narrow, wide = (spread_positions(8192, 1024, features) for features in (64, 8192))
    assert narrow[1] == wide[1] and narrow[0] > wide[0] >= wide[1]
    assert spread_positions(1024, 4096, 64) == (4096, 4096)
