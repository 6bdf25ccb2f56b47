"""The example whose experience comes from a running product: what it sampled is what is trained on, and it reaches its documented result."""

import json
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyreme.net.ports import free_port
from support.waiting import wait_until
from support.whole_run import Up

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "product"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "product"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
    subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    return folder


@contextmanager
def used(folder, *overrides):
    """A run of the example, and its product."""
    port = free_port()
    up = Up(folder / "run.yaml", *overrides, f"environment.online.port={port}", "name=run", f"output_dir={folder / 'runs'}")
    key = up.run_dir / "online" / "key"
    wait_until(lambda: key.exists() or up.process.poll() is not None)
    command = [sys.executable, str(folder / "product.py"), f"http://127.0.0.1:{port}/v1", str(key)]
    with open(folder / "product.log", "w") as log, subprocess.Popen(command, stderr=log) as product:
        try:
            yield up
        finally:
            product.kill()


def test_what_a_product_saw_is_what_is_trained_on(folder):
    """The log-probabilities that the replica reported are those of the first model."""
    short = ("iterations=1", "trainer.sft=[]", "rollout.engine=transformers", "groups_per_iteration=2", "group_size=4")
    with used(folder, *short) as up:
        assert up.wait() == 0, up.output
    samples = [json.loads(line) for line in (up.run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    assert len(samples) == 8 and {sample["label"] for sample in samples} == {
        sample["messages"][0]["content"] for sample in samples
    }
    model = AutoModelForCausalLM.from_pretrained(folder / "data" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "data" / "model")
    for sample in samples:
        prompt = tokenizer.encode(f"{sample['messages'][0]['content']}=", add_special_tokens=False)
        ids = torch.tensor([prompt + sample["token_ids"]])
        with torch.no_grad():
            found = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        found = found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(sample["logprobs"], found, atol=2e-4)


@pytest.mark.slow
def test_the_product_reaches_its_documented_result(folder):
    with used(folder) as up:
        assert up.wait() == 0, up.output
    rewards = [record["reward/mean"] for record in up.records("iteration")]
    assert rewards[0] < 0.35 and sum(rewards[-4:]) / 4 > 0.7, up.output
    counted = up.records("rollout")[-1]
    assert counted["online/trained"] >= 24 * 64 and counted["online/dropped_invalid"] == 0
