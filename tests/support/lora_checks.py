"""Runs in the ranks of test_lora: compares adapters with PEFT's, an independent implementation in plain torch, and runs the engine."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

from polyreme.config.trainer import LoraConfig, ParallelConfig
from polyreme.experience.metric_records import fields_of
from polyreme_trainer.learner.engine import RowsLoss
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.export import ADAPTER, Export, export_hf
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, rank_slices
from polyreme_trainer.megatron.layers.accelerator import CUDA
from polyreme_trainer.megatron.layers.cpu.spec import CPU
from polyreme_trainer.megatron.layers.spec import ModelSpec
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.stages.table import cross_entropy
from support import learning

TOLERANCE = 1e-5
LORA = LoraConfig(rank=3, alpha=6)


@dataclass(frozen=True)
class Case:
    """A model, a spec of its layers, and adapters on it."""

    model: Path
    spec: ModelSpec
    lora: LoraConfig


def compare_with_peft(models: str, folder: str) -> None:
    """Compares values, gradients, export and merge of adapters on each of the `models` (JSON list of directories), with both specs."""
    device = Device("cpu")
    init_parallel(ParallelConfig(), device)
    some = LoraConfig(rank=5, alpha=3, targets=["q_proj", "v_proj", "o_proj"], rslora=True)
    for number, model in enumerate(map(Path, json.loads(models))):
        for spec, lora in ((CPU, LORA), (CUDA, some)):
            check_case(Case(model, spec, lora), Path(folder) / f"{number}-{lora.rank}", device)


def check_case(case: Case, out: Path, device: Device) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    arch = load_architecture(case.model)
    policy = Policy(arch, "float32", device, trainable=True, spec=case.spec, lora=case.lora, seed=3, recompute="full")
    policy.load_hf(case.model)
    adapters = policy.adapters
    assert adapters is not None
    ids = torch.randint(1, arch.vocab, (3, 17), generator=torch.Generator().manual_seed(0))
    targets = ids.roll(-1, 1)
    plain = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    assert_close(policy.logits(ids), plain(ids).logits, rtol=0, atol=1e-4)  # B is zero
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for piece in rank_slices(adapters.arch, Rank()):
            if piece.hf_name.endswith("lora_B.weight"):
                adapters.params[piece.param][piece.param_index].normal_(0, 0.1, generator=random)

    tensors = policy.full_tensors()
    assert tensors is not None
    export_hf(out, Export(tensors, {"config.json": (case.model / "config.json").read_bytes()}, policy.adapter(str(case.model))))
    theirs = peft.PeftModel.from_pretrained(plain, str(out / ADAPTER), is_trainable=True)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert_close(theirs(ids).logits, merged(ids).logits, rtol=0, atol=TOLERANCE)

    found = policy.logprobs(ids, targets)
    expected = theirs(ids).logits.log_softmax(-1).gather(2, targets[:, :, None]).flatten()
    assert_close(found, expected, rtol=0, atol=TOLERANCE)
    (-found.mean()).backward()
    (-expected.mean()).backward()
    compare_gradients(policy, dict(theirs.named_parameters()))
    with adapters.off():
        again = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        assert_close(policy.logits(ids), again(ids).logits, rtol=0, atol=1e-4)
    weights: dict[str, Tensor] = theirs.merge_and_unload().state_dict()
    for name in tensors.keys() & weights.keys():
        assert_close(tensors[name], weights[name], rtol=0, atol=1e-6, msg=name)


def compare_gradients(policy: Policy, theirs: dict[str, Any]) -> None:
    """Compares the gradients of every tensor that PEFT trains. No other tensor has one."""
    adapters = policy.adapters
    assert adapters is not None
    names = {name for name, param in theirs.items() if param.requires_grad}
    for piece in rank_slices(adapters.arch, Rank()):
        name = f"base_model.model.{piece.hf_name.removesuffix('.weight')}.default.weight"
        names.discard(name)
        mine: Tensor = adapters.params[piece.param].main_grad[piece.param_index]
        assert_close(mine, theirs[name].grad[piece.hf_index], rtol=0, atol=TOLERANCE, msg=name)
    assert not names
    assert all(param.requires_grad == (name in adapters.params) for name, param in policy.module.named_parameters())
    assert sum(buffer.numel for chunk in policy.ddp for buffer in chunk.buffers) == sum(
        param.numel() for param in adapters.params.values()
    )


def warm_start_and_train(config: str, out: str) -> None:
    """Runs a warm start and two iterations, with a checkpoint in between, and writes the weights of the last version."""
    rank = learning.Rank(*learning.start(config))
    assert rank.engine.load() is None
    for phase in rank.config.trainer.sft:
        rank.engine.begin_phase(phase)
        rows = learning.supervised_rows(rank.engine.policy.arch.vocab)
        rank.engine.forward_backward("actor", rows, RowsLoss(cross_entropy()))
        rank.engine.optim_step("actor", phase.lr)
    rank.engine.begin_iterations()
    rank.save(0)
    first = rank.iterate(1)
    rank.save(1)
    gates = [fields_of(gate.record()) for gate in rank.engine.compare_hf(rank.engine.hf_path(1))]
    rank.write(Path(out, "whole"), {"gates": gates, "first": first, "second": rank.iterate(2)})
    rank.engine.close()


def resume_and_train(config: str, out: str) -> None:
    """Repeats the second iteration of `warm_start_and_train` from its checkpoint."""
    rank = learning.Rank(*learning.start(config))
    assert rank.engine.load() == 1
    rank.write(Path(out, "resumed"), {"second": rank.iterate(2)})
    rank.engine.close()


@torch.no_grad()
def compare_classifiers(model: Path, exported: Path) -> None:
    """PEFT's classifier of the base model with the adapters and the head of an export has the outputs of the merged export."""
    import peft
    from transformers import AutoModelForSequenceClassification

    merged = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    base.config.pad_token_id = merged.config.pad_token_id
    theirs = peft.PeftModel.from_pretrained(base, str(exported / ADAPTER))
    ids = torch.randint(3, merged.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    assert_close(theirs(ids).logits, merged(ids).logits, rtol=0, atol=TOLERANCE)
    assert float(merged(ids).logits.abs().max()) > 0
