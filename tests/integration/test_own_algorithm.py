"""The example of a custom algorithm, trained by the engine and compared with plain torch."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyreme.config.model import ModelConfig
from support import learning
from support.configs import ALGORITHM, run_config
from support.models import tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real
EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm" / "algorithm.py"
TOLERANCE = 1e-5


def test_the_engine_trains_with_the_example(tmp_path: Path) -> None:
    path = tiny_model("tied", tmp_path / "model")
    config = run_config(tmp_path, model=ModelConfig(path=path))
    optimizer = config.trainer.optimizer.model_copy(update={"lr": learning.LR, "eps": learning.EPS})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"optimizer": optimizer})})
    sections = json.dumps({"own": {**ALGORITHM, "source": {"file": str(EXAMPLE)}}})
    run_ranks(learning.train_every_way, 1, config.model_dump_json(), sections, str(tmp_path))
    recorded = json.loads((tmp_path / "own.json").read_text())["trained"]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    for iteration, trained in enumerate(recorded, start=1):
        loss = torch.zeros(())
        groups = learning.made_up_groups(iteration, model.config.vocab_size)
        tokens = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
        for group in groups:
            median = float(np.median([sample.score for sample in group.samples]))
            for sample in group.samples:
                ids = torch.tensor([*group.prompt_ids, *sample.token_ids])[None].long()
                logprobs = F.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
                mask = torch.from_numpy(sample.loss_mask.copy())
                loss = loss - ((sample.score - median) * logprobs[len(group.prompt_ids) - 1 :] * mask).sum() / tokens
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        assert trained["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert trained["own/capped_fraction"] == 0.0
    weights = load_file(tmp_path / "own.safetensors")
    torch.testing.assert_close(weights, {name: model.state_dict()[name] for name in weights}, rtol=0, atol=TOLERANCE)
