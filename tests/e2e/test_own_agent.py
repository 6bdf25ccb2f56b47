"""The example whose agent is a program that uses the public client of OpenAI: its tokens are exact, and it reaches its documented result."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyreme.rundir.run_records import read_summary
from support.whole_run import Up

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_agent"


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "own_agent"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "__pycache__"))
    subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    return folder / "run.yaml"


def test_what_an_agent_is_trained_on_is_what_the_policy_sampled(config):
    """The log-probabilities that the replica reported are those of the first model, in the context of each turn."""
    short = (
        "iterations=1",
        "trainer.sft=[]",
        "rollout.engine=transformers",
        "groups_per_iteration=2",
        "group_size=4",
        f"output_dir={config.parent / 'runs'}",
    )
    up = Up(config, *short, "name=short")
    assert up.wait() == 0, up.output
    samples = [json.loads(line) for line in (up.run_dir / "samples" / "iteration_0001.jsonl").read_text().splitlines()]
    assert [len(sample["turns"]) for sample in samples] == [3] * 8, "random letters are no word with vowels"
    model = AutoModelForCausalLM.from_pretrained(config.parent / "data" / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(config.parent / "data" / "model")
    for sample in samples:
        first, second = (message["content"] for message in sample["messages"][:3:2])
        prompt = tokenizer.encode(f"{first}=", add_special_tokens=False)
        ids = torch.tensor([prompt + sample["token_ids"]])
        with torch.no_grad():
            found = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        found = found.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
        for turn in sample["turns"]:
            part = slice(turn["start"], turn["end"])
            np.testing.assert_allclose(sample["logprobs"][part], found[part], atol=2e-4)
        between = sample["token_ids"][sample["turns"][0]["end"] : sample["turns"][1]["start"]]
        assert second.startswith("only ") and tokenizer.decode(between).removeprefix("<eos>") == f"{second}="


@pytest.mark.slow
def test_the_example_reaches_its_documented_result(config):
    up = Up(config, "name=whole", f"output_dir={config.parent / 'runs'}")
    assert up.wait() == 0, up.output
    rewards = [record["reward/mean"] for record in up.records("iteration")]
    first, last = rewards[0], sum(rewards[-4:]) / 4
    assert first < 0.35 and last > 0.8, up.output
    assert up.records("iteration")[-1]["episode/turns/mean"] < 2 < up.records("iteration")[0]["episode/turns/mean"]
    assert read_summary(up.run_dir)["not_learned"] == []
