"""`python -m polyreme_trainer.testing.simulated_learner`: a learner that learns nothing, for tests and scale runs of all around it, without torch.

Kept here: log, arena, publisher, checkpoints and the order of their steps are the real learner's; only the training is a sleep. A
version's bytes are digests of all plans and payloads up to it, in order, so that they prove what was trained, how often, and in which
order, and a replay must arrive at the same bytes.
"""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog, Plan, Role
from polyreme.experience.records import GroupRecord, decode_group
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import RIDE_OVER, connect
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error, settle
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.megatron.atomic import discard, new_directory
from polyreme_trainer.weight_sync.publisher import Publisher

ATTACH_SECONDS = 60.0
SLOT_SECONDS = 3.0
STATE_SECONDS = 0.5

LAYOUT = plan_manifest([TensorSpec("weight", "U8", (64,))])


@dataclass(frozen=True)
class Weights:
    """What `version` iterations make: SHA-256 chains over their plans, and over the groups' bytes."""

    version: int = 0
    plans: bytes = bytes(32)
    payloads: bytes = bytes(32)

    def trained_on(self, plan: Plan, payloads: Sequence[bytes]) -> "Weights":
        """The weights after the plan's iteration."""
        groups = hashlib.sha256(self.payloads)
        for payload in payloads:
            groups.update(hashlib.sha256(payload).digest())
        return Weights(plan.iteration, after_plan(self.plans, plan), groups.digest())


def after_plan(before: bytes, plan: Plan) -> bytes:
    """The chain over plans, one further."""
    return hashlib.sha256(before + f"{plan.iteration}: {plan.indices}".encode()).digest()


class SimulatedLearner:
    """The loop of `learner/main.py` with a sleep in place of the training.

    Args:
        run, config: the run.
        experience: its log, with the learner's term.
        publisher, arena: of that term.
        train_seconds: what an iteration's training takes.
    """

    def __init__(
        self, run: Run, config: RunConfig, experience: ExperienceLog, publisher: Publisher, arena: Arena, train_seconds: float
    ) -> None:
        self._run, self._config, self._experience = run, config, experience
        self._publisher, self._arena, self._train_seconds = publisher, arena, train_seconds
        self._checkpoints = config.run_dir / "checkpoints"
        self._layout = plan_manifest([TensorSpec("weight", "U8", (arena.slot_nbytes,))])

    async def run(self) -> None:
        """Trains to the last iteration, or until the run drains; what was trained is saved in both cases."""
        config = self._config
        weights, saved = await self._begin()
        settle()
        while weights.version < config.iterations:
            trained = await self._iterate(weights)
            if trained is None:
                break
            weights = trained
            if config.trainer.save_interval and weights.version % config.trainer.save_interval == 0:
                await self._save(weights)
                saved = weights.version
        if saved != weights.version:
            await self._save(weights)
        if weights.version == config.iterations:
            await self._committed(weights.version)
            await self._run.emit({"kind": "done_learning"})

    async def _begin(self) -> tuple[Weights, int]:
        loaded = newest(self._checkpoints)
        weights = loaded or Weights()
        written = await self._write(weights)
        await self._experience.begin(weights.version)
        if loaded is None:
            await self._save(weights)
        self._publisher.publish(*written)
        if await self._committed(weights.version) and await self._run.check() is RunState.STARTING:
            await self._run.set_state(RunState.RUNNING)
        return weights, weights.version

    async def _iterate(self, weights: Weights) -> Weights | None:
        """One iteration: plan, train, write, push. None when the run drains instead."""
        began = time.perf_counter()
        if await self._draining():
            return None
        plan = await self._experience.wait_plan(weights.version + 1, self._config.trainer.straggler_timeout)
        if plan is None:
            await self._run.check()
            return None
        payloads = await self._experience.read(plan)
        waited = time.perf_counter()
        await asyncio.sleep(self._train_seconds)
        weights = weights.trained_on(plan, payloads)
        trained = time.perf_counter()
        written = await self._write(weights)
        wrote = time.perf_counter()
        await self._experience.set_version(weights.version)
        self._publisher.publish(*written)
        seconds = {
            "learner_wait": waited - began,
            "train": trained - waited,
            "write": wrote - trained,
            "iteration": time.perf_counter() - began,
        }
        await self._report(weights, [decode_group(payload) for payload in payloads], seconds)
        return weights

    async def _write(self, weights: Weights) -> tuple[Manifest, int, int]:
        """Puts the weights into a free slot: manifest, slot and generation, as `Publisher.publish` takes them."""
        assert self._experience.term is not None
        term = self._experience.term.counter
        slot = await self._publisher.acquire_slot(SLOT_SECONDS)
        self._arena.begin(slot)
        view = self._arena.slot_view(slot)
        tensor_views(LAYOUT, view)["weight"][:] = np.frombuffer(weights.plans + weights.payloads, np.uint8)
        sealed = seal(self._layout.stamped(self._run.run_id, term, weights.version), view)
        return sealed, slot, self._arena.complete(slot, weights.version, term)

    async def _report(self, weights: Weights, groups: Sequence[GroupRecord], seconds: dict[str, float]) -> None:
        samples = [sample for group in groups for sample in group.samples]
        lengths = [len(sample.token_ids) for sample in samples]
        staleness = [weights.version - 1 - min(span[0] for span in sample.spans) for sample in samples]
        await self._run.emit(
            {
                "kind": "iteration",
                "iteration": weights.version,
                "time": time.time(),
                "weights": (weights.plans + weights.payloads).hex(),
                "reward/mean": float(np.mean([sample.score for sample in samples])),
                "reward/std": float(np.std([sample.score for sample in samples])),
                "response/length_mean": float(np.mean(lengths)),
                "response/length_max": max(lengths),
                "staleness/mean": float(np.mean(staleness)),
                "staleness/max": max(staleness),
                **{f"time/{name}": value for name, value in seconds.items()},
                "time/generate": max(group.generate_seconds for group in groups),
                "time/score": max(group.score_seconds for group in groups),
                "tokens/generated": sum(lengths),
                "tokens_per_second": sum(lengths) / seconds["iteration"],
                "samples_per_second": len(samples) / seconds["iteration"],
            }
        )

    async def _save(self, weights: Weights) -> None:
        path = self._checkpoints / f"iteration-{weights.version:06d}"
        with new_directory(path) as folder:
            state = {"version": weights.version, "plans": weights.plans.hex(), "payloads": weights.payloads.hex()}
            (folder / "state.json").write_text(json.dumps(state))
        there = sorted(self._checkpoints.glob("iteration-*"))
        kept = there[-self._config.trainer.keep_checkpoints :]
        for old in there[: -len(kept)]:
            discard(old)
        oldest = int(kept[0].name.removeprefix("iteration-"))
        await self._experience.release(max(0, min(oldest, await self._run.recorded())))
        await self._run.emit({"kind": "saved", "iteration": weights.version, "path": str(path), "hf_path": str(path)})

    async def _committed(self, version: int) -> bool:
        """Waits until the run's replicas, or one when it has started already, serve `version`; False when the run drains first."""
        rollout = self._config.rollout
        replicas = rollout.replicas if await self._run.check() is RunState.STARTING else 1
        waiting = asyncio.ensure_future(self._publisher.wait_committed(version, replicas, rollout.start_timeout))
        try:
            while not (await asyncio.wait({waiting}, timeout=STATE_SECONDS))[0]:
                if await self._draining():
                    return False
            waiting.result()
            return True
        finally:
            waiting.cancel()

    async def _draining(self) -> bool:
        return await self._run.check() in (RunState.DRAINING, RunState.DONE)


def newest(checkpoints: Path) -> Weights | None:
    """What the newest checkpoint holds; None: there is none."""
    found = sorted(checkpoints.glob("iteration-*/state.json"))
    if not found:
        return None
    state = json.loads(found[-1].read_text())
    return Weights(state["version"], bytes.fromhex(state["plans"]), bytes.fromhex(state["payloads"]))


async def _learn(train_seconds: float, weight_bytes: int) -> None:
    url, run_id = os.environ["POLYREME_REDIS"], os.environ["POLYREME_RUN"]
    redis = await connect(url, RIDE_OVER)
    try:
        run = await Run.attach(redis, run_id, ATTACH_SECONDS)
        experience = ExperienceLog(run)
        term = await experience.take(Role.LEARNER)
        arena = Arena.create(run_id, weight_bytes)
        publisher = Publisher(url, run_id, term, arena)
        publisher.start()
        try:
            await SimulatedLearner(run, await run.config(), experience, publisher, arena, train_seconds).run()
        finally:
            publisher.close()
            arena.close()
    finally:
        await redis.aclose()


def simulated(
    train_seconds: Annotated[float, typer.Option(min=0, help="What the training of an iteration takes.")] = 0.1,
    weight_bytes: Annotated[int, typer.Option(min=LAYOUT.nbytes, help="Of a version: its digests, and zeros.")] = LAYOUT.nbytes,
) -> None:
    """Learns nothing. POLYREME_REDIS and POLYREME_RUN name the run; all else is in its record."""
    logging_setup.setup("learner-0")
    with exit_on_error("learner"):
        asyncio.run(_learn(train_seconds, weight_bytes))


if __name__ == "__main__":
    typer.run(simulated)
