"""A real replica process and the pushes of a learner: for tests and benchmarks of the rollout service."""

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.process.lifecycle import Child
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from support.tiny_tokenizer import model_files as tokenizer_files

CALL_SECONDS = 120.0


def rollout_config(model: Path, dtype: str = "float32", **rollout: Any) -> RunConfig:
    """A run configuration, of which only the rollout part matters."""
    return parse_config(
        {
            "name": "replica-test",
            "iterations": 1,
            "groups_per_iteration": 1,
            "group_size": 2,
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": "/none", "max_prompt_tokens": 8},
            "rollout": {"max_new_tokens": 8, "max_model_len": 128, "vllm": {"kv_cache_mib": 64}, "max_num_seqs": 64} | rollout,
            "reward": {"rewards": [{"name": "exact"}]},
            "trainer": {"optimizer": {"lr": 1.0}},
        },
        "test",
    )


def model_files(model: Path) -> dict[str, bytes]:
    """The files of a Hugging Face directory without weights; with a tokenizer's files when it has none."""
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix != ".safetensors"}
    return {name: data for name, data in tokenizer_files().items() if name.startswith(("tokenizer", "chat"))} | files


def hf_weights(model: Path) -> dict[str, np.ndarray]:
    """The directory's tensors by name, float32."""
    from safetensors.numpy import load_file

    return {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}


def is_tied(model: Path) -> bool:
    return bool(json.loads((model / "config.json").read_text())["tie_word_embeddings"])


@dataclass
class Learner:
    """The learner's side of one replica: writes versions into an arena and pushes them over gRPC."""

    run_id: str
    layout: Manifest
    arena: Arena
    term: int = 1
    slot: int = -1

    @classmethod
    def of(cls, run_id: str, model: Path, term: int = 1) -> "Learner":
        specs = [TensorSpec(name, "F32", tensor.shape) for name, tensor in sorted(hf_weights(model).items())]
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if is_tied(model) else {}
        layout = plan_manifest(specs, aliases)
        return cls(run_id, layout, Arena.create(run_id, layout.nbytes), term)

    def write(self, version: int, weights: Mapping[str, np.ndarray]) -> weights_pb2.StageArenaRequest:
        """Writes a version into the next slot. Returns the request that stages it."""
        self.slot = (self.slot + 1) % self.arena.slots
        self.arena.begin(self.slot)
        views = tensor_views(self.layout, self.arena.slot_view(self.slot))
        for name, tensor in weights.items():
            views[name][...] = tensor
        generation = self.arena.complete(self.slot, version, self.term)
        manifest = seal(self.layout.stamped(self.run_id, self.term, version), self.arena.slot_view(self.slot))
        return weights_pb2.StageArenaRequest(
            manifest=manifest.to_proto(), arena_path=str(self.arena.path), slot=self.slot, generation=generation
        )

    async def push(
        self, stub: weights_pb2_grpc.WeightsServiceStub, version: int, weights: Mapping[str, np.ndarray]
    ) -> weights_pb2.CommitResponse:
        """Writes, probes, stages and commits a version."""
        staging = self.write(version, weights)
        id = staging.manifest.id
        probe = weights_pb2.ProbeRequest(
            run_id=self.run_id, term=self.term, arena_path=str(self.arena.path), nonce=self.arena.nonce
        )
        assert (await stub.Probe(probe, timeout=CALL_SECONDS)).can_map
        await stub.StageArena(staging, timeout=CALL_SECONDS)
        return await stub.Commit(weights_pb2.CommitRequest(id=id), timeout=CALL_SECONDS)


@dataclass
class Answer:
    """The collected stream of one sequence."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    chunk_lengths: list[int] = field(default_factory=list)
    oldest: list[int] = field(default_factory=list)
    finish: int = 0
    spans: list[tuple[int, int, int]] = field(default_factory=list)


def request(
    run_id: str, prompt: list[int], slots: list[tuple[int, list[int], int, int]], min_version: int = 0, **sampling: Any
) -> rollout_pb2.GenerateRequest:
    """slots: (index, prefix ids, max_new, seed). Greedy by default."""
    parameters = {"temperature": 0.0, "top_p": 1.0, "top_k": -1} | sampling
    return rollout_pb2.GenerateRequest(
        run_id=run_id,
        request_id="test",
        prompt_ids=np.asarray(prompt, "<i4").tobytes(),
        slots=[
            rollout_pb2.Slot(index=index, prefix_ids=np.asarray(prefix, "<i4").tobytes(), max_new=max_new, seed=seed)
            for index, prefix, max_new, seed in slots
        ],
        sampling=rollout_pb2.SamplingParams(**parameters),
        min_version=min_version,
    )


async def generate(stub: rollout_pb2_grpc.RolloutServiceStub, asked: rollout_pb2.GenerateRequest) -> dict[int, Answer]:
    """Runs a Generate call to its end."""
    answers: dict[int, Answer] = {slot.index: Answer() for slot in asked.slots}
    async for response in stub.Generate(asked, timeout=CALL_SECONDS):
        for chunk in response.chunks:
            answer, ids = answers[chunk.slot], np.frombuffer(chunk.token_ids, "<i4")
            answer.ids += ids.tolist()
            answer.logprobs += np.frombuffer(chunk.logprobs, "<f4").tolist()
            answer.chunk_lengths.append(len(ids))
            answer.oldest.append(chunk.oldest_version)
        for end in response.ends:
            answer = answers[end.slot]
            assert answer.finish == 0, "a slot ended twice"
            answer.finish = end.finish_reason
            answer.spans = [(span.version, span.start, span.end) for span in end.spans]
    return answers


@dataclass
class Replica:
    """A running `polyreme rollout` with stubs."""

    child: Child
    lease: Lease
    run: Run
    rollout: rollout_pb2_grpc.RolloutServiceStub
    weights: weights_pb2_grpc.WeightsServiceStub


@asynccontextmanager
async def replica(redis_url: str, run_id: str, model: Path, log: Path, config: RunConfig) -> AsyncIterator[Replica]:
    """Starts the command and waits for its lease. Stops it at the end of the block."""
    redis = await connect(redis_url)
    run = await Run.create(redis, run_id, config, model_files(model))
    command = [sys.executable, "-m", "polyreme", "rollout", "--redis", redis_url, "--run", run_id]
    child = Child.spawn("rollout", command, log_path=log)
    try:
        try:
            [lease] = await Registry(run).wait_for("rollout", 1, 300, alive=lambda: child.poll() is None)
        except Exception:
            print(child.log_tail(60))
            raise
        async with rpc.connect(lease.address) as channel:
            yield Replica(
                child, lease, run, rollout_pb2_grpc.RolloutServiceStub(channel), weights_pb2_grpc.WeightsServiceStub(channel)
            )
    finally:
        await child.stop(300)
        await redis.aclose()
