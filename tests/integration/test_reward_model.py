"""Reward models in separate processes: scores equal those of transformers, and every failure is a status."""

import asyncio
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from polyreme.api.v1 import reward_pb2
from polyreme.errors import ConfigError
from polyreme.experience import loading
from polyreme.experience.run import Run
from polyreme_reward.items import Item, RewardError, Status
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.model.classifier import Classifier
from polyreme_reward.model.reward import ModelOptions, ModelReward
from polyreme_reward.scorer import Scored
from support.models import tiny_model, tiny_reward_model
from support.processes import descendants
from support.rewards import item, scoring, serving
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files
from support.waiting import until

TEMPLATE = (
    "{% for m in messages %}{% if 'forever' in m['content'] %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}{% if 'rude' in m['content'] %}{{ raise_exception('no such talk') }}{% endif %}{% endfor %}"
) + CHAT_TEMPLATE
TEXTS = [
    ("what is 1+1", "2"),
    ("a", "b" * 40),
    ("add up a lot of numbers, please", "1+2+3=6"),
    ("x", "y"),
    ("hm", "so it is #5"),
] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier whose MLP is so wide that a long text takes much memory."""
    return tiny_reward_model(tmp_path_factory.mktemp("model") / "rm", template=TEMPLATE, wide=8192)


def options(**fields: Any) -> dict[str, Any]:
    return asdict(ModelOptions(**{"prompt_column": None, **fields}))


def direct(path: Path, texts: Sequence[str], label: int = 0) -> list[float]:
    """Scores by transformers, text after text."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    classifier = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        rows = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        return [float(classifier(row["input_ids"]).logits[0, label]) for row in rows]


def conversations(path: Path, pairs: Sequence[tuple[str, str]]) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}], tokenize=False
        )
        for prompt, response in pairs
    ]


@pytest.mark.parametrize("pad", [0, None, 1], ids=["a pad token", "none", "the end token"])
@pytest.mark.parametrize("template", ["chat", "none"])
def test_a_score_is_that_of_transformers_whatever_its_batch(tmp_path: Path, pad: int | None, template: str) -> None:
    path = tiny_reward_model(tmp_path / "rm", pad=pad, outputs=3)
    classifier = Classifier(str(path), options(template=template, label=2))
    rows = [classifier.encode(Item("", prompt, response, f"{response}<eos>")) for prompt, response in TEXTS]
    texts = conversations(path, TEXTS) if template == "chat" else [f"{prompt}{response}<eos>" for prompt, response in TEXTS]
    expected = direct(path, texts, label=2)
    assert len(set(expected)) == len(set(TEXTS))
    assert [o.value for o in classifier.score(rows)] == pytest.approx(expected, abs=1e-5)
    assert [classifier.score([row])[0].value for row in rows] == pytest.approx(expected, abs=1e-5)


def test_every_id_in_use_and_no_pad_token(tmp_path: Path) -> None:
    classifier = Classifier(str(tiny_reward_model(tmp_path / "rm", pad=None)), options())
    rows = [[1, 2, 3], [token for token in range(48) if token != 33], [33]]
    alone = [classifier.score([row])[0].value for row in rows]
    assert [o.value for o in classifier.score(rows)] == pytest.approx(alone, abs=1e-5)


def test_messages_come_from_the_rows_column(tmp_path: Path) -> None:
    path = tiny_reward_model(tmp_path / "rm")
    classifier = Classifier(str(path), options(prompt_column="talk"))
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    given = [Item("", "<user>hi<assistant>", "ho", metadata_json=json.dumps({"talk": talk})) for talk in ("hi", ["hi"], messages)]
    expected = direct(
        path, ["<user>hi<assistant>ho<eos>", "<user>hi<assistant>ho<eos>", "<system>be kind<user>hi<assistant>ho<eos>"]
    )
    assert [o.value for o in classifier.score([classifier.encode(i) for i in given])] == pytest.approx(expected, abs=1e-5)


def _causal(path: Path) -> Path:
    tiny_model("tied", path)
    for name, content in model_files().items():
        if name != "config.json":
            (path / name).write_bytes(content)
    return path


def _without(name: str):
    def make(path: Path) -> Path:
        (tiny_reward_model(path) / name).unlink()
        return path

    return make


@pytest.mark.parametrize(
    ("make", "fields", "said"),
    [
        (lambda p: tiny_reward_model(p, outputs=2), {}, r"one output \(num_labels 1\); found 2 outputs.*options.label"),
        (lambda p: tiny_reward_model(p, outputs=2), {"label": 2}, "below the model's 2 outputs"),
        (_causal, {}, r"no weights for .*score\.weight"),
        (lambda p: tiny_reward_model(p, template=None), {}, "a chat template.*options.template: none"),
        (_without("model.safetensors"), {}, "a sequence classifier and its tokenizer"),
        (_without("tokenizer.json"), {}, r"a tokenizer in .*tokenizer\.json"),
        (tiny_reward_model, {"max_length": 99999}, "at most the model's 16384"),
        (tiny_reward_model, {"max_length": 3}, "1 to 3 tokens.*found 5"),
        (tiny_reward_model, {"device": "cuda:7"}, "a machine with cuda:7"),
        (tiny_reward_model, {"device": "npu"}, "torch_npu"),
    ],
    ids=["outputs", "label", "causal", "template", "weights", "tokenizer", "long", "short", "cuda", "npu"],
)
def test_a_model_that_cannot_be_used_is_one_error_at_load(tmp_path: Path, make, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Classifier(str(make(tmp_path / "rm")), options(**fields))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype"),
        ({"batch_token": 5}, "batch_tokens"),
        ({"batch_tokens": 0}, "greater than or equal to 1"),
    ],
)
def test_options_are_checked_before_anything_starts(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelReward("rm", 1.0, tmp_path, given, 1.0, 1.0, 64, RewardMetrics())


def test_what_a_model_cannot_score_is_a_status(tmp_path: Path) -> None:
    classifier = Classifier(str(tiny_reward_model(tmp_path / "rm", template=TEMPLATE)), options(max_length=50))
    for response, said in [
        ("x" * 50, "1 to 50 tokens.*found"),
        ("x" * 600, "at most 50 tokens; found 6.. characters"),
        ("so rude", "no such talk"),
        ("\ud800", "UTF-8"),
    ]:
        with pytest.raises(RewardError, match=said):
            classifier.encode(Item("", "p", response))
    rows = [classifier.encode(Item("", "p", response)) for response in ("z", "y")]
    nan, good = classifier.score(rows)
    assert (nan.status, good.status) == (Status.INVALID, Status.OK)
    assert good.value == pytest.approx(classifier.score([rows[1]])[0].value, abs=1e-5)


async def reports_a_whole_load(run: Run) -> bool:
    """Whether the run has records of the model's load up to its end."""
    records = [record for _, record in await run.records("0", 0) if record["kind"] == "loading"]
    fractions = [record["fraction"] for record in records]
    assert {record["role"] for record in records} <= {"reward model rm"} and fractions == sorted(fractions)
    return len(fractions) > 1 and fractions[0] < 1.0 == fractions[-1]


async def test_a_service_scores_with_a_model_and_every_failure_is_a_status(
    model: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "REPORT_SECONDS", 0.0)
    before = {p.pid for p in descendants()}
    reward = {"model": str(model), "weight": 2.0, "options": {"prompt_column": None, "batch_tokens": 256, "max_length": 200}}
    faults = {"z": "INVALID", "x" * 300: "ERROR", "rude": "ERROR"}
    async with serving(reward, {"name": "length"}, run=run) as (stub, _, _):
        await until(lambda: reports_a_whole_load(run))
        listed = (await stub.ListRewards(reward_pb2.ListRewardsRequest(), timeout=300)).rewards[0]
        assert listed.name == "rm" and listed.version.startswith("rm-")
        assert listed.description.startswith("Qwen2ForSequenceClassification, ")
        pairs = [*TEXTS, *(("p", response) for response in faults)]
        asked = [reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(prompt=p, response=r)]) for p, r in pairs]
        replies = await asyncio.gather(*(stub.Score(request, timeout=300) for request in asked))
        whole = reward_pb2.ScoreRequest(items=[request.items[0] for request in asked])
        together = (await stub.Score(whole, timeout=300)).results
    expected = direct(model, conversations(model, TEXTS))
    for results in ([reply.results[0] for reply in replies], together):
        assert [r.parts[0].raw for r in results[: len(TEXTS)]] == pytest.approx(expected, abs=1e-5)
        assert [r.parts[0].weighted for r in results[: len(TEXTS)]] == pytest.approx([2 * e for e in expected], abs=1e-5)
        found = [reward_pb2.ScoreStatus.Name(r.status).removeprefix("SCORE_STATUS_") for r in results[len(TEXTS) :]]
        assert found == list(faults.values())
        assert [(r.score, len(r.parts), bool(r.message)) for r in results[len(TEXTS) :]] == [(0.0, 1, True)] * 3
    assert not [p for p in descendants() if p.pid not in before]


def scores(answers: list[Scored]) -> list[float]:
    assert {answer.status for answer in answers} == {Status.OK}, answers
    return [answer.score for answer in answers]


async def test_hangs_crashes_and_the_memory_limit_cost_the_item_that_caused_them(model: Path) -> None:
    before = {p.pid for p in descendants()}
    reward = {"model": str(model), "options": {"prompt_column": None, "batch_tokens": 128}}
    good = [item(response, prompt=prompt) for prompt, response in TEXTS]
    async with scoring(reward, item_timeout=3.0, worker_memory_mib=96) as scorer:
        expected = scores(await scorer.score(good))
        assert expected == pytest.approx(direct(model, conversations(model, TEXTS)), abs=1e-5)
        (keeper,) = [p for p in descendants() if p.pid not in before and p.ppid() == psutil.Process().pid]
        files = psutil.Process().num_fds()

        mixed = [*good[:10], item("forever"), item("for forever"), *good[10:], item("x" * 4000)]
        answers = await scorer.score(mixed)
        hung, hog = [answers.pop(10), answers.pop(10)], answers.pop()
        assert [answer.status.name for answer in (*hung, hog)] == ["TIMEOUT", "TIMEOUT", "ERROR"], (hung, hog)
        assert "3 s" in hung[0].message and "does not fit into memory" in hog.message
        assert scores(answers) == pytest.approx(expected, abs=1e-5)

        for blow in (signal.SIGKILL, signal.SIGSTOP):
            (process,) = keeper.children()
            call = asyncio.ensure_future(scorer.score(good))
            await asyncio.sleep(0.001)
            process.send_signal(blow)
            assert scores(await call) == pytest.approx(expected, abs=1e-5)
        assert scorer.inside == 0 and psutil.Process().num_fds() <= files
    assert not [p for p in descendants() if p.pid not in before]


async def test_without_torch_the_error_names_the_extra(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = {p.pid for p in descendants()}
    with pytest.raises(ConfigError, match=r"torch.*polyreme-reward\[model\]"):
        async with scoring({"model": str(model)}):
            pass
    with pytest.raises(ConfigError, match=r"no config\.json"):
        async with scoring({"model": str(tmp_path)}):
            pass
    assert not [p for p in descendants() if p.pid not in before]
