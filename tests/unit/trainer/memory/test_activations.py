"""The memory of a step matches its formulas. bench/memory.py measures the peaks."""

from dataclasses import replace

import pytest

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.megatron.batches.attention_blocks import spread_positions
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank
from polyreme_trainer.megatron.huggingface.lora_mapping import adapter_architecture
from polyreme_trainer.megatron.layers import activation, logprobs
from polyreme_trainer.memory import activations
from polyreme_trainer.memory.activations import MicroBatchSize, layer_bytes, step_terms
from polyreme_trainer.memory.sharding import Sharding
from polyreme_trainer.memory.state import Model
from support.configs import GLM4_MOE
from support.published import CONFIGS


def architecture(name: str = "Qwen2.5-7B-Instruct") -> Architecture:
    return read_architecture(HfConfig(CONFIGS[name], name))


ALONE = Sharding()


def step(arch: Architecture, batch: MicroBatchSize, sharding: Sharding = ALONE, dtype: str = "bfloat16") -> list[int]:
    return [term.nbytes for term in step_terms(Model("actor", arch, dtype, trained=True), sharding, batch)]


def test_the_block_of_logits_is_that_of_the_log_probabilities() -> None:
    assert activations.BLOCK_LOGITS == logprobs.BLOCK_LOGITS
    assert activations.ACCELERATOR_LOGITS == logprobs.ACCELERATOR_LOGITS


def test_the_rows_of_a_gated_activation_are_its_own() -> None:
    assert activations.GATED_ROWS == activation.ROWS


def test_a_layer_saves_the_inputs_of_its_operations() -> None:
    arch = architecture()
    numbers = 4 * 3584 + 2 * 3584 + 2 * 512 + 3 * 18944
    statistics = 4 * (28 + 2)  # log-sum-exp of each head, and the norms' deviations
    assert layer_bytes(arch, Sharding(), 2) == 2 * numbers + statistics
    tensor = 2 * (4 * 3584 + (numbers - 4 * 3584) // 4) + 4 * (28 // 4 + 2)
    assert layer_bytes(arch, Sharding(Rank(tp=4)), 2) == tensor
    more = 2 * (5 - 2) * 512  # a context rank keeps the keys and values of both
    assert layer_bytes(arch, Sharding(context_ranks=2), 2) == 2 * numbers + statistics + more


def test_activations_follow_tokens_layers_and_stages() -> None:
    arch, batch = architecture(), MicroBatchSize(1024, 1024)
    saved = step(arch, batch)[0]
    assert saved == 1024 * 28 * layer_bytes(arch, Sharding(), 2)
    assert step(arch, replace(batch, tokens=2048))[0] == 2 * saved
    assert step(arch, batch, Sharding(Rank(pp=2)))[0] == saved // 2
    assert step(arch, batch, Sharding(Rank(pp=2), micro_batches=2))[0] == saved


def test_recomputed_activations_are_saved_in_one_layer_only() -> None:
    arch, batch = architecture(), MicroBatchSize(1024, 1024)
    whole, selective, full = (step(arch, replace(batch, recompute=kind)) for kind in (None, "selective", "full"))
    layer = layer_bytes(arch, ALONE, 2)
    assert whole[0] - selective[0] == 1024 * 28 * 2 * 3 * 18944
    assert full[0] == 1024 * 28 * 2 * 3584
    assert sum(whole) - sum(full) >= 1024 * 27 * (layer - 2 * 3584) - whole[1]
    assert sum(full) < sum(selective) < sum(whole)


def test_experts_save_what_their_chosen_tokens_pass_and_not_the_dense_mlp() -> None:
    arch = architecture("Qwen3-235B-A22B")
    one, two = (layer_bytes(replace(arch, top_k=count), Sharding(), 2) for count in (1, 2))
    assert two - one == 2 * (4096 + 4 * 1536)
    for cut in (1, 2, 4):  # these ranks each have the tokens of all of them, of which sequence parallelism gives each of 2 a half
        one, two = (layer_bytes(replace(arch, top_k=count), Sharding(Rank(tp=2, etp=cut)), 2) for count in (1, 2))
        assert two - one == 2 * (4096 * cut + 4 * 1536) // 2
    assert layer_bytes(replace(arch, ffn=1), Sharding(), 2) == layer_bytes(arch, Sharding(), 2)


def test_the_dense_layers_of_a_model_with_experts_save_what_a_dense_model_does() -> None:
    arch, batch = read_architecture(HfConfig(GLM4_MOE)), MicroBatchSize(1024, 1024)
    sparse, dense = (layer_bytes(each, ALONE, 2) for each in (arch, replace(arch, experts=0, top_k=0)))
    assert step(arch, batch)[0] == 1024 * (3 * sparse + dense)
    assert step(arch, batch, Sharding(Rank(pp=2)))[0] == 1024 * (sparse + dense)
    assert step(arch, batch, Sharding(Rank(pp_rank=1, pp=2)))[0] == 1024 * 2 * sparse
    assert step(arch, batch, Sharding(Rank(pp=2, vpp=2), micro_batches=3))[0] == 1024 * (sparse + dense) // 2 * 3
    assert step(arch, replace(batch, recompute="full"))[0] == 1024 * 4 * 2 * 8


@pytest.mark.parametrize(
    ("dtype", "entropy", "each"), [("float32", False, 8), ("float32", True, 12), ("bfloat16", False, 10), ("bfloat16", True, 14)]
)
def test_logits_beside_their_gradient(dtype: str, entropy: bool, each: int) -> None:
    arch, tokens, width = architecture(), 64, 4 if dtype == "float32" else 2
    table, hidden = 152064 * 3584 * width, 2 * tokens * 3584 * width
    assert step(arch, MicroBatchSize(tokens, tokens, entropy), dtype=dtype)[1] == tokens * 152064 * each + table + hidden


def test_logits_stay_within_a_block() -> None:
    arch = architecture()
    whole = 4096 * 152064 * 10
    [_, blocks] = step(arch, MicroBatchSize(4096, 4096))
    table, block = 152064 * 3584 * 2, 2**24 // 4096
    assert blocks == 4096 * block * 10 + table + (block * 2 + 4096 * 4) * 3584 + 2 * 4096 * 3584 * 2
    assert blocks < whole / 4


def test_a_critic_has_no_logits() -> None:
    arch, batch = architecture(), MicroBatchSize(1024, 1024)
    assert step(replace(arch, head="value"), batch)[1] < step(arch, batch)[1]


def test_beside_adapters_embedding_and_output_layer_have_no_gradient() -> None:
    arch, batch = architecture(), MicroBatchSize(1024, 1024)
    lora = LoraConfig(rank=16)
    adapted = step_terms(Model("actor", arch, "bfloat16", trained=True, adapter=adapter_architecture(arch, lora)), ALONE, batch)
    full = step_terms(Model("actor", arch, "bfloat16", trained=True), ALONE, batch)
    inner = 1024 * 28 * 2 * 7 * 16  # the rank's numbers of each of seven projections
    assert adapted[0].nbytes == full[0].nbytes + inner
    assert sum(term.nbytes for term in adapted[1:]) < sum(term.nbytes for term in full[1:])


def wide(lora: LoraConfig, batch: MicroBatchSize, sharding: Sharding = ALONE) -> int:
    """Bytes of the B of fused layers."""
    arch = architecture()
    model = Model("actor", arch, "bfloat16", trained=True, adapter=adapter_architecture(arch, lora))
    return sum(term.nbytes for term in step_terms(model, sharding, batch) if term.name == "actor B of fused layers")


def test_each_micro_batch_saves_the_b_of_fused_layers_as_matrices() -> None:
    """Queries, keys and values have 48 columns, gate and up 32. The output projection and down are not fused layers."""
    batch, lora = MicroBatchSize(1024, 1024), LoraConfig(rank=16)
    whole = 28 * 2 * ((3584 + 2 * 512) * 3 * 16 + 2 * 18944 * 2 * 16)
    assert wide(lora, batch) == wide(lora, replace(batch, tokens=64)) == whole
    assert wide(lora, batch, Sharding(Rank(tp=4))) == whole // 4
    assert wide(lora, batch, Sharding(Rank(pp=2), micro_batches=2)) == whole
    assert wide(lora, replace(batch, recompute="full")) == 0
    assert wide(LoraConfig(rank=16, targets=["v_proj"]), batch) == 28 * 2 * (3584 + 2 * 512) * 16
    assert wide(LoraConfig(rank=16, targets=["o_proj", "down_proj"]), batch) == 0


def added(arch: Architecture, batch: MicroBatchSize, sharding: Sharding = ALONE) -> dict[str, int]:
    """What padded attention adds, by name."""
    model = Model("actor", arch, "float32", trained=True)
    before, after = (
        {term.name: term.nbytes for term in step_terms(model, sharding, each)} for each in (replace(batch, padded=0), batch)
    )
    assert after.items() >= before.items()
    return {name.removeprefix("actor attention "): after[name] for name in after.keys() - before.keys()}


def test_padding_saves_the_tensors_of_attention_for_each_position() -> None:
    arch, batch = architecture("Qwen2.5-0.5B-Instruct"), MicroBatchSize(2048, 2048, padded=64)
    for sharding in (ALONE, Sharding(Rank(tp=2), micro_batches=2)):
        tp = sharding.rank.tp
        positions, tokens = spread_positions(2048, 64, 896 // tp)
        assert positions > tokens
        padding = (positions - tokens) * 2 * (896 + 128) + tokens * 896  # each output, with and without padding
        assert added(arch, batch, sharding) == {"padding": 24 * sharding.micro_batches * 4 * padding // tp}
    full = added(arch, replace(batch, recompute="full"))["padding"]
    assert 24 * full == added(arch, batch)["padding"]


def test_a_window_saves_its_mask_and_the_keys_before_queries() -> None:
    arch = replace(architecture(), window=1024, sliding=(True,) * 14 + (False,) * 14)
    assert added(arch, MicroBatchSize(1024, 1024, padded=1024)) == {}
    keys = 4 * 2 * 512
    for longest in (1025, 32768):
        batch = MicroBatchSize(longest, longest, padded=longest)
        assert added(arch, batch)["window"] == 1024**2 * 5 + longest * 14 * keys
        assert added(arch, replace(batch, recompute="full"))["window"] == 1024**2 * 5 + longest * keys
