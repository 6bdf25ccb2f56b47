"""The public SDK, unmodified, against a training service with megatron's learner: numbers, restarts, tenants."""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyreme.hub.tiny_model import write_tiny_model
from polyreme_trainer.learner.gates import LIMITS
from support.service import Service, service, tenant, three_tenants
from support.tinker_client import SEQUENCES, STEPS, WEIGHTS

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    write_tiny_model(folder / "model")
    with service(folder, folder / "model", "tiny", 64, agents=True) as started:
        yield started


def plain_steps(base: Path, adapter: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps with torch and PEFT alone: the adapter's tensors after them, and the losses."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter, is_trainable=True).eval()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    adam = torch.optim.AdamW(trained.values(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        adam.zero_grad()
        total = torch.zeros(())
        for ids, weights in zip(SEQUENCES, WEIGHTS, strict=True):
            logprobs = model(input_ids=torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
            total = total - (torch.tensor(weights) * logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]).sum()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        adam.step()
        losses.append(float(total.detach()))
    return {name.replace(".default.", "."): param.detach() for name, param in trained.items()}, losses


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def test_twenty_steps_are_those_of_plain_torch(running: Service, tmp_path: Path) -> None:
    outcome = tenant(running, "twenty_steps", tmp_path).result()
    wanted, losses = plain_steps(running.folder.parents[1] / "model", running.saved(outcome["start"]))
    found = adapter_of(running.saved(outcome["end"]))
    assert found.keys() == wanted.keys()
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5
    np.testing.assert_allclose(outcome["losses"], losses, rtol=1e-4)
    assert outcome["losses"][-1] < 0.9 * outcome["losses"][0]
    assert outcome["difference"] < 1e-4 < 1e-2 < outcome["moved"], "the sampler has the learner's weights, not the base model's"
    first, again = outcome["tokens"]
    assert first == again and first[0] != first[1], "a seed decides the answers, and each has its own"


async def test_killed_processes_cost_a_client_nothing(running: Service, tmp_path: Path) -> None:
    """Two tenants train at the same time; the second run has no kills, and other tenants between its requests."""
    disturbed = tenant(running, "continued", tmp_path)
    for line, part in (("2 ", "learner"), ("5 ", "api"), ("9 ", "learner")):
        await disturbed.wait_for(line)
        running.kill(part)
    lost = disturbed.result()
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    kept = tenant(running, "continued", quiet).result()
    assert lost["losses"] == kept["losses"]
    one, two = (adapter_of(running.saved(each["end"])) for each in (lost, kept))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"data": 2}], ids=lambda each: next(iter(each)))
async def test_a_killed_rank_costs_a_client_nothing(layout: dict[str, int], running: Service, tmp_path: Path) -> None:
    """The learner has two ranks. Its losses and weights are those of one rank up to rounding."""
    alone = tenant(running, "continued", tmp_path).result()
    model = running.folder.parents[1] / "model"
    with service(tmp_path, model, "tiny", 64, parallel=layout) as several:
        found = []
        for kills in ((("2 ", 1), ("7 ", 0)), ()):
            (folder := tmp_path / str(len(found))).mkdir()
            program = tenant(several, "continued", folder)
            for line, rank in kills:
                await program.wait_for(line)
                several.kill("learner", rank)
            found.append(await asyncio.to_thread(program.result))
        lost, kept = found
        assert lost["losses"] == kept["losses"]
        np.testing.assert_allclose(kept["losses"], alone["losses"], rtol=1e-4)
        one, two = (adapter_of(several.saved(each["end"])) for each in found)
        assert all(torch.equal(one[name], two[name]) for name in one)
        wanted = adapter_of(running.saved(alone["end"]))
        assert max(float((one[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4


def test_a_client_trains_on_what_an_agent_has_sampled(running: Service, tmp_path: Path) -> None:
    outcome = tenant(running, "agent", tmp_path).result()
    assert outcome["difference"] < 1e-4, "the learner has the sampler's log-probabilities, at the tokens that it sampled"
    assert 2 <= outcome["sampled"] <= 12
    np.testing.assert_allclose(outcome["loss"], -outcome["sampled"], rtol=1e-3)


async def test_a_ppo_loop_with_a_critic_outlives_the_learner(running: Service, tmp_path: Path) -> None:
    """The value loss of 24 tokens falls from about 70 to below 10."""
    disturbed = tenant(running, "actor_critic", tmp_path)
    await disturbed.wait_for("4 ")
    running.kill("learner")
    lost = disturbed.result()
    (quiet := tmp_path / "quiet").mkdir()
    kept = tenant(running, "actor_critic", quiet).result()
    assert lost["losses"] == kept["losses"]
    one, two = (adapter_of(running.saved(each["end"])) for each in (lost, kept))
    assert "base_model.model.score.weight" in one and all(torch.equal(one[name], two[name]) for name in one)
    values = [value for _, value in lost["losses"]]
    assert values[0] > 50 and max(values[-4:]) < 10, values


async def test_a_killed_sampler_or_redis_costs_a_client_nothing(running: Service, tmp_path: Path) -> None:
    """Each step samples from the weights of the one before, so every answer decides the next weights."""
    disturbed = tenant(running, "sampled", tmp_path)
    for line, part in (("2 ", "sampler"), ("5 ", "redis"), ("8 ", "sampler"), ("11 ", "redis")):
        await disturbed.wait_for(line)
        running.kill(part)
    lost = disturbed.result()
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    kept = tenant(running, "sampled", quiet).result()
    assert (lost["tokens"], lost["losses"]) == (kept["tokens"], kept["losses"])
    one, two = (adapter_of(running.saved(each["end"])) for each in (lost, kept))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
async def test_twenty_kills_cost_three_tenants_nothing(running: Service, tmp_path: Path) -> None:
    """Of any process, at random, while each answer decides the weights that follow. POLYREME_FAULT_SEED=N: other ones."""
    rng, end = random.Random(int(os.environ.get("POLYREME_FAULT_SEED", 1))), tmp_path / "end"
    program = three_tenants(running.url, "tiny", tmp_path, str(end))
    await program.wait_for("2 0")
    for _ in range(20):
        running.kill(rng.choice(("api", "learner", "sampler", "redis")))
        await asyncio.sleep(rng.expovariate(1 / 4.0))
    end.touch()
    lost = await asyncio.to_thread(program.result)
    quiet = tmp_path / "quiet"
    quiet.mkdir()
    steps = [str(len(each["losses"])) for each in lost]
    assert lost == await asyncio.to_thread(three_tenants(running.url, "tiny", quiet, *steps).result)


async def test_tenants_of_different_ranks_share_the_base_model(running: Service, tmp_path: Path) -> None:
    """The same program has the same weights alone and beside others."""
    programs = []
    for number, case in enumerate(("twenty_steps", "continued", "twenty_steps")):
        folder = tmp_path / str(number)
        folder.mkdir()
        programs.append(tenant(running, case, folder))
    first, other, second = (program.result() for program in programs)
    assert first["losses"] == second["losses"] != other["losses"]
    one, two = (adapter_of(running.saved(each["end"])) for each in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_vllm_and_the_learner_agree_for_every_model(tmp_path: Path) -> None:
    """Of adapters that share a batch, of one that was evicted, of one that was saved again, and of all parameters."""
    write_tiny_model(tmp_path / "model")
    limit = LIMITS["float32"].mismatch_kl
    with service(tmp_path, tmp_path / "model", "tiny", 64, "vllm", {"max_loras": 2, "kv_cache_mib": 64}) as running:
        outcome = tenant(running, "adapters", tmp_path).result()
        assert outcome["base"], "the base model has no adapter, also beside others"
        assert max(*outcome["own"], outcome["again"]) < limit < 10 * limit < min(outcome["others"]), outcome
        whole = tenant(running, "full_parameters", tmp_path).result()
        assert max(whole["own"]) < limit, whole
        assert max(outcome["prompts"] + whole["prompts"]) < 1e-4, (outcome, whole)


def test_a_refused_request_leaves_the_model_as_it_was(running: Service, tmp_path: Path) -> None:
    outcome = tenant(running, "refused", tmp_path).result()
    assert "token ids from 0 to" in outcome["problems"][0]
    assert "loss_fn = 'stable_reinforce'" in outcome["problems"][1]
    assert np.isfinite(outcome["losses"]).all()
