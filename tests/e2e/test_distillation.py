"""On-policy distillation as a whole run, with a teacher on vLLM's own server and without rewards."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.whole_run import RIGHT, Up, make_task

TEACHER_SECONDS = 300.0
ITERATIONS = 16


@pytest.mark.real
def test_a_policy_learns_to_answer_as_its_teacher(tmp_path: Path) -> None:
    """The warm policy answers with any digit, the teacher always with the same one. The KL to the teacher falls without a reward
    service."""
    path = make_task(tmp_path, engine="transformers")
    train_teacher(tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "teacher")
    tree = yaml.safe_load(path.read_text())
    del tree["reward"], tree["data"]["eval"]
    tree["trainer"]["parallel"] = {"tensor": 1}
    with teacher_server(tmp_path / "teacher", tmp_path / "teacher.log") as url:
        path.write_text(yaml.safe_dump({**tree, "algorithm": {"preset": "distillation"}, "teacher": {"url": url}}))
        up = Up(path, f"iterations={ITERATIONS}")
        assert up.wait() == 0, up.output
    records = [json.loads(line) for line in (up.run_dir / "metrics.jsonl").read_text().splitlines()]
    iterations = [record for record in records if record["kind"] == "iteration"]
    kl = [record["actor/teacher_kl"] for record in iterations]
    assert len(kl) == ITERATIONS and kl[0] > 1.0 and kl[-1] < 0.5 * kl[0], kl
    scores = [record["reward/mean"] for record in iterations]
    assert scores == [record["reward/teacher"] for record in iterations]
    assert scores[-1] > scores[0]
    first, last = samples(up.run_dir, 1), samples(up.run_dir, ITERATIONS)
    assert sum(line["response"] == RIGHT for line in last) > 2 * sum(line["response"] == RIGHT for line in first)
    assert all(len(line["teacher_logprobs"]) == line["tokens"] for line in last)
    assert not list(up.run_dir.rglob("reward*.log"))


def samples(run_dir: Path, iteration: int) -> list[dict[str, Any]]:
    """The samples that an iteration trained on."""
    return [json.loads(line) for line in (run_dir / "samples" / f"iteration_{iteration:04d}.jsonl").read_text().splitlines()]


def train_teacher(model: Path, data: Path, path: Path) -> None:
    """Trains the untrained policy with plain torch to answer every prompt with RIGHT."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    taught = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts = [json.loads(line)["prompt"] for line in data.read_text().splitlines()]
    rows = []
    for prompt in prompts:
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        rows.append(tokenizer(f"{text}{RIGHT}{tokenizer.eos_token}", add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.AdamW(taught.parameters(), lr=2e-3)
    for step in range(80):
        batch = [rows[(32 * step + place) % len(rows)] for place in range(32)]
        width = max(map(len, batch))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
        labels = torch.tensor([[-100] * (len(row) - 2) + row[-2:] + [-100] * (width - len(row)) for row in batch])
        loss = taught(ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    taught.save_pretrained(path)
    tokenizer.save_pretrained(path)


@contextmanager
def teacher_server(model: Path, log: Path) -> Iterator[str]:
    """Runs `vllm serve` on CPU. Yields the URL of its API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments: dict[str, Any] = {"model": model, "host": "127.0.0.1", "port": port, "dtype": "float32", "max-model-len": 64}
    arguments |= {"kv-cache-memory-bytes": 64 << 20, "served-model-name": "teacher", "max-num-seqs": 32}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--no-enable-chunked-prefill"]
    command += [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
    }
    settings |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **settings}, start_new_session=True)
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + TEACHER_SECONDS
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=10):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(f"no teacher within {TEACHER_SECONDS:.0f} s:\n{log.read_text(errors='replace')[-4000:]}")
