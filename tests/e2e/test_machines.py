"""Three machines: a trainer with Redis and the reward, and two replicas that get only the address of Redis."""

import asyncio
import shutil
import sys
from pathlib import Path

import pytest

from polyreme.api.v1 import rollout_pb2_grpc
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.process.lifecycle import Child
from polyreme.weights.manifest import Manifest
from polyreme_trainer.weight_sync.publisher import Publisher
from support.machines import Machine, Network, redis_on
from support.models import tiny_model
from support.proxy import bad_network
from support.replicas import Learner, generate, hf_weights, request, rollout_config
from support.replicas import model_files as hf_files
from support.simulated import ROWS, config_tree
from support.simulated_run import SimulatedRun
from support.tiny_tokenizer import model_files

VERSION_BYTES = 8 << 20
DELAY_SECONDS = 0.03
CUT_SECONDS = 8.0
ITERATIONS = 100
PROMPT = [5, 6, 7, 8, 9]


class Spread(SimulatedRun):
    """The run's processes on the machines."""

    places: dict[str, Machine]

    def start(self, name: str) -> None:
        environment = {"POLYREME_REDIS": self.redis_url, "POLYREME_RUN": self.run.run_id, "OMP_NUM_THREADS": "1"}
        command = self.places[name].command((sys.executable, "-m", *self.commands[name]))
        self.children[name] = Child.spawn(name, command, environment, self.folder / f"{name}.log")


async def commits(run: Run) -> dict[str, int]:
    """The newest version of each replica."""
    return {record["replica"]: record["version"] for _, record in await ExperienceLog(run).commits("0")}


@pytest.mark.slow
async def test_a_run_over_three_machines_outlives_a_cut_link(net: Network, run_id: str, tmp_path: Path) -> None:
    trainer, near, far = (net.add() for _ in range(3))
    near.shape()
    far.shape()
    async with redis_on(trainer, tmp_path) as url, bad_network(far.address, 50077, net.address) as proxy:

        async def delay(_: bytes) -> None:
            await asyncio.sleep(DELAY_SECONDS)

        proxy.listener = delay
        redis = await connect(url)
        config = config_tree(
            tmp_path, ROWS, iterations=ITERATIONS, max_staleness=1, rollout={"replicas": 2, "start_timeout": 600.0}
        )
        run = await Run.create(redis, run_id, config, model_files())
        rollout = ("polyreme_rollout.testing.simulated_replicas", "--step-seconds", "0.002")
        started = Spread(
            url,
            run,
            tmp_path,
            {
                "near": rollout,
                "far": (*rollout, "--port", "50077", "--advertise", f"{net.address}:{proxy.port}"),
                "reward": ("polyreme", "reward"),
                "train": (
                    *("polyreme_trainer.testing.simulation", "--log-dir", str(tmp_path)),
                    *("--train-seconds", "0.2", "--weight-bytes", str(VERSION_BYTES)),
                ),
            },
        )
        started.places = {"near": near, "far": far, "reward": trainer, "train": trainer}
        try:
            for name in started.commands:
                started.start(name)

            async def until(replicas: int, beyond: int) -> dict[str, int]:
                async with asyncio.timeout(600):
                    while True:
                        found = {name: version for name, version in (await commits(run)).items() if version > beyond}
                        if len(found) >= replicas:
                            return found
                        assert started.children["train"].poll() is None, started.logs()
                        await asyncio.sleep(0.05)

            there = await until(2, 4)
            near.cut()
            await asyncio.sleep(CUT_SECONDS)
            alone = await until(1, max(there.values()) + 3)  # the run continued
            near.heal()
            await until(2, max(alone.values()))
            assert await started.ended(900) == ("done", ""), started.logs()
            assert (await ExperienceLog(run).audit()).clean
            assert [record["iteration"] for record in await started.records("iteration")] == [*range(1, ITERATIONS + 1)]
            assert {record["path"] for record in await started.records("commit")} <= {"stream", "delta"}
            notices = [record["text"] for record in await started.records("notice")]
            assert sum("receives them by stream" in text for text in notices) >= 2, notices
            assert any(f"at {near.address}:" in text for text in notices), notices
            assert any(f"at {net.address}:{proxy.port} joined" in text for text in notices), notices
        except TimeoutError:
            raise AssertionError(started.logs()) from None
        finally:
            near.heal()
            await asyncio.gather(*(child.stop(300) for child in started.children.values()))
            await redis.aclose()


@pytest.mark.slow
@pytest.mark.real
async def test_a_machine_joins_with_nothing_but_redis_address(net: Network, run_id: str, tmp_path: Path) -> None:
    trainer, machine = net.add(), net.add()
    machine.shape()
    model = tiny_model("tied", tmp_path / "model", hidden_size=128)
    weights, expected = hf_weights(model), greedy(model, 16)
    async with redis_on(trainer, tmp_path) as url:
        redis = await connect(url)
        run = await Run.create(redis, run_id, rollout_config(model), hf_files(model))
        learner = Learner.of(run_id, model)
        shutil.rmtree(model)
        term = await ExperienceLog(run).take(Writer.LEARNER)
        publisher = Publisher(url, run_id, term, learner.arena)
        publisher.start()
        command = machine.command((sys.executable, "-m", "polyreme", "rollout", "--redis", url))
        child = Child.spawn("rollout", command, log_path=tmp_path / "rollout.log")
        try:
            staging = learner.write(0, weights)
            publisher.publish(Manifest.from_proto(staging.manifest), staging.slot, staging.generation)
            await publisher.wait_committed(0, 1, 600)
            [lease] = await Registry(run).leases("rollout")
            assert lease.address.startswith(f"{machine.address}:")
            assert lease.http_address.startswith(f"{machine.address}:")
            async with rpc.connect(lease.address) as channel:
                stub = rollout_pb2_grpc.RolloutServiceStub(channel)
                answer = (await generate(stub, request(run_id, PROMPT, [(0, [], 16, 0)])))[0]
            assert (answer.ids, answer.spans) == (expected, [(0, 0, 16)])
            [commit] = [record for _, record in await run.records("0", 0) if record["kind"] == "commit"]
            assert commit["path"] in ("stream", "delta")
        except Exception:
            print(child.log_tail(60))
            raise
        finally:
            publisher.close()
            await child.stop(300)
            learner.arena.close()
            await redis.aclose()


def greedy(model: Path, tokens: int) -> list[int]:
    """The greedy continuation of PROMPT by `transformers`."""
    import torch
    from transformers import AutoModelForCausalLM

    reference, ids = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), list(PROMPT)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]
