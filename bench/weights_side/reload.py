"""Measures reloads of a vLLM worker in this otherwise idle process with one thread. Prints the thread's processor seconds as JSON.

python -m weights_side.reload MODEL REPEATS     (MODEL: a directory with config.json; the weights are random)

{"reload": the replica's worker, "vllm": vLLM's own layer-wise reload, "copy": one plain copy of as many bytes, "bytes"}: medians. The three
run in turn, under the same load.
"""

import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_USE_V2_MODEL_RUNNER="0",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
)

import torch

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture

WARM_UP = 2


def start_worker(model: Path) -> Any:
    """Starts vLLM's worker like a replica on CPU."""
    from vllm import LLM

    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        enforce_eager=True,
        kv_cache_memory_bytes=64 << 20,
        enable_chunked_prefill=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        worker_extension_cls="polyreme_rollout.engine.worker.PolicyWorker",
    )
    worker: Any = llm.llm_engine.model_executor.driver_worker
    return worker.worker


def measure(worker: Any, model: Path, repeats: int) -> dict[str, float]:
    arch = load_architecture(model)
    plan = plan_manifest(
        [TensorSpec(name, "F32", shape) for name, shape in hf_mapping.hf_shapes(arch).items()], hf_mapping.hf_aliases(arch)
    )
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    arena = Arena.create(run_id, plan.nbytes)
    try:
        arena.begin(0)
        for view in tensor_views(plan, arena.slot_view(0)).values():
            torch.from_numpy(view).uniform_(-0.05, 0.05)
        generation = arena.complete(0, 0, 1)
        manifest = seal(plan.stamped(run_id, 1, 0), arena.slot_view(0)).to_proto().SerializeToString()
        part = (str(arena.path), arena.nonce, 0, generation, manifest)

        def reload() -> None:
            answer = worker.polyreme_load([part])
            if "error" in answer:
                raise SystemExit(answer["traceback"])

        def reload_by_vllm() -> None:
            learned, worker.polyreme_copies = worker.polyreme_copies, None
            reload()
            worker.polyreme_copies = learned

        source = torch.rand(plan.nbytes // 4)
        target = torch.empty_like(source)
        acts: dict[str, Callable[[], object]] = {"reload": reload, "vllm": reload_by_vllm, "copy": lambda: target.copy_(source)}
        found: dict[str, list[float]] = {name: [] for name in acts}
        for turn in range(WARM_UP + repeats):
            for name, act in acts.items():
                started = time.thread_time()
                act()
                if turn >= WARM_UP:
                    found[name].append(time.thread_time() - started)
        learned = float(worker.polyreme_copies is not None)
        return {**{name: statistics.median(each) for name, each in found.items()}, "bytes": plan.nbytes, "learned": learned}
    finally:
        arena.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    print(json.dumps(measure(start_worker(path), path, int(sys.argv[2]))), flush=True)
    os._exit(0)  # vLLM's engine in this process has nothing to close
