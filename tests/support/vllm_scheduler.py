"""vLLM's own scheduler, extended as in a replica. Its model samples 1, 2, 3 and so on for each request, and needs no weights."""

from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyreme_rollout.engine.scheduler import LONGEST_WAIT_SECONDS, extend_scheduler
from polyreme_rollout.engine.vllm_arguments import CPU_BLOCK_TOKENS, engine_arguments
from support.replicas import rollout_config

SLOTS, CONTEXT = 3, 128
ROOMY = 64
"""Blocks for all requests that run at once."""
TIGHT = 1 + CONTEXT // CPU_BLOCK_TOKENS
"""Blocks for one request of full length. vLLM keeps one block for itself."""


class Engine:
    """A scheduler and its model.

    Attributes:
        now: the scheduler's time, in seconds.
        in_flight: steps that are planned before the first one's result is known.
        outputs: what the scheduler delivers for each request, in order.
    """

    def __init__(self, vllm_config: Any, blocks: int) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        spec = FullAttentionSpec(block_size=CPU_BLOCK_TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        vllm_config.cache_config.num_gpu_blocks = blocks
        self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=CPU_BLOCK_TOKENS,
            hash_block_size=CPU_BLOCK_TOKENS,
        )
        self.now = 0.0
        self.scheduler.polyreme_clock = lambda: self.now
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(CPU_BLOCK_TOKENS, sha256)
        self.in_flight, self._results = int(bool(vllm_config.scheduler_config.async_scheduling)), deque[tuple[Any, Any]]()
        self._sampled: Counter[str] = Counter()
        self.tokens: dict[str, int] = {}
        self.outputs: dict[str, list[Any]] = defaultdict(list)

    def add(self, id: str, prompt: int, new: int, priority: int = 0, **params: Any) -> None:
        """Adds a request of `prompt` tokens that samples `new`. Ordinary prompts share their beginning; an urgent one shares nothing."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        first = 3 if priority >= 0 else 200 * len(self.tokens)
        sampling = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=0, **params)
        order: dict[str, Any] = {"arrival_time": len(self.tokens), "priority": priority}
        request = Request(id, list(range(first, first + prompt)), sampling, None, block_hasher=self._hasher, **order)
        self.tokens[id] = 0
        self.scheduler.add_request(request)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests())

    @property
    def running(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def gather(self) -> None:
        """Lets time pass until an idle scheduler expects no further request."""
        if not self.scheduler.running:
            planned = self.scheduler.schedule()
            assert not planned.num_scheduled_tokens, "this plan has no result"
            self.now += LONGEST_WAIT_SECONDS

    def step(self) -> int:
        """Plans a step, and takes the result of the oldest one. Returns the number of messages that are sent."""
        self.gather()
        return self.step_now()

    def step_now(self) -> int:
        """As `step`, at the current time."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        preempted = {request.request_id: request.num_preemptions for request in self.scheduler.running}
        planned = self.scheduler.schedule()
        ids = list(planned.num_scheduled_tokens)
        returned = [id for id in ids if id in preempted and self.scheduler.requests[id].num_preemptions > preempted[id]]
        assert returned == [], "preempted and planned in one step, which a model runner does not support"
        drawn = {id: not self.scheduler.requests[id].is_prefill_chunk for id in ids}
        self._sampled.update(id for id in ids if drawn[id])
        tokens = np.array([self._sampled[id] for id in ids]).reshape(-1, 1)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: place for place, id in enumerate(ids)},
            sampled_token_ids=[[self._sampled[id]] if drawn[id] else [] for id in ids],
            logprobs=LogprobsLists(tokens, -tokens.astype(np.float32), tokens[:, 0]),
        )
        self._results.append((planned, result))
        if len(self._results) <= self.in_flight:
            return 0
        messages = self.scheduler.update_from_output(*self._results.popleft())
        for output in (each for message in messages.values() for each in message.outputs):
            self.tokens[output.request_id] += len(output.new_token_ids)
            self.outputs[output.request_id].append(output)
        return len(messages)


def start_scheduler(model: Path, blocks: int, asynchronous: bool, chunk: int | None = None) -> Engine:
    """Starts it for a replica of `SLOTS` sequences. `chunk`: the prompt tokens of a step at most; None: whole prompts."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    vllm = {"chunked_prefill": chunk is not None, "max_num_batched_tokens": chunk}
    config = rollout_config(model, max_model_len=CONTEXT, max_num_seqs=SLOTS, vllm=vllm)
    vllm_config = AsyncEngineArgs(**engine_arguments(config, model, True, 5)).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = asynchronous
    extend_scheduler(vllm_config.scheduler_config)
    return Engine(vllm_config, blocks)
