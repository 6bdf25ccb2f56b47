"""The guide's commands of lm-evaluation-harness on real vLLM through a gateway, compared with the same weights in transformers."""

import asyncio
import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support import guide
from support.gateways import gateway
from support.models import tiny_model
from support.own_venv import own_venv
from support.replicas import Learner, hf_weights, model_files, replica, rollout_config
from support.tiny_tokenizer import SPECIAL

TOKENS = 8


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with lm_eval's commands, in a separate environment, since its lock differs from ours."""
    return own_venv("lm-eval", tmp_path_factory.mktemp("lm-eval"))


def questions(model: Path, tokenizer: Tokenizer, chat: bool) -> list[dict[str, Any]]:
    """Sums with the model's answers and its more likely choices, computed by transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def logprobs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.as_tensor(reference(torch.tensor([ids])).logits[0].log_softmax(-1))

    found = []
    for place in range(40):
        question = f"{place}+{7 * place % 40}="
        asked = tokenizer.encode(f"<user>{question}<assistant>" if chat else question).ids
        ids = list(asked)
        for _ in range(TOKENS):
            ids.append(int(logprobs(ids)[-1].argmax()))
        answer = ids[len(asked) :]
        if min(answer) < len(SPECIAL) or max(answer) >= tokenizer.get_vocab_size():
            continue  # it ends early, or has a token without text
        choices = [f"{(place + k) % 10}{(7 * place + k) % 10}" for k in (0, 3, 6)]
        totals = []
        for choice in choices:
            tail = tokenizer.encode(choice).ids
            rows = logprobs(asked + tail)
            totals.append(sum(float(rows[len(asked) + i - 1, token]) for i, token in enumerate(tail)))
        label = totals.index(max(totals))
        text = tokenizer.decode(answer)
        if sorted(totals)[-1] - sorted(totals)[-2] > 0.01 and " " not in text:  # a clear preference, and no white space to strip
            found.append({"question": question, "answer": text, "choices": choices, "label": label})
    return found


def measure(command: str, folder: Path, harness: Path, url: str, tokenizer: Path) -> dict[str, Any]:
    """Runs one of the guide's commands. Returns its results by task."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")},
        "PATH": f"{harness}:{os.environ['PATH']}",
        "URL": url,
        "MODEL": "replica-test@0",
        "TOKENIZER": str(tokenizer),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    done = subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    place = "chat_results" if "chat_results" in command else "results"
    [file] = (folder / place).rglob("results_*.json")
    results: dict[str, Any] = json.loads(file.read_text())["results"]
    return results


@pytest.mark.real
@pytest.mark.slow
async def test_the_guides_commands_measure_what_transformers_computes(redis_url: str, tmp_path: Path, harness: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model("untied", tmp_path / "model", hidden_size=128, context=256)
    files = model_files(model)
    (tokenizer := tmp_path / "tokenizer").mkdir()
    for name, data in files.items():
        (tokenizer / name).write_bytes(data)
    plain, chat = guide.commands("evaluation.md", "run")
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", rollout_config(model, max_model_len=256)) as there:
        learner = Learner.of(run_id, model)
        try:
            await learner.push(there.weights, 0, hf_weights(model))
            async with gateway(there.run) as http:
                for command, tasks in (
                    (plain, {"sums_choice": "acc,none", "sums_text": "exact_match,none"}),
                    (chat, {"sums_text": "exact_match,none"}),
                ):
                    rows = questions(model, Tokenizer.from_file(str(tokenizer / "tokenizer.json")), chat=command is chat)
                    assert len(rows) >= 5 and all(len({row[name] for row in rows}) > 1 for name in ("label", "answer"))
                    (tmp_path / "tasks").mkdir(exist_ok=True)
                    guide.write_files("evaluation.md", tmp_path / "tasks")
                    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
                    found = await asyncio.to_thread(
                        measure, command, tmp_path, harness, f"{http.base_url}/v1".replace("//v1", "/v1"), tokenizer
                    )
                    assert {task: found[task][metric] for task, metric in tasks.items()} == dict.fromkeys(tasks, 1.0)
        finally:
            learner.arena.close()
