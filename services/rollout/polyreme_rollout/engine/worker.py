"""The vLLM worker's part of a weight swap: it maps the arena and reloads layer by layer. Mixed into vLLM's worker class.

Invariant: no method raises, because one worker's exception would leave the answers of its peers unread; the answer carries the
error instead. After a failed load the next load starts from a clean state.

vLLM builds fused and packed tensors from Hugging Face tensors while it loads, and on CPU it keeps only the packed ones. The first
load therefore runs vLLM's own loading, since only vLLM knows every packing. On CPU it is recorded, and later loads repeat its
copies (`learned_copies`) if these have given the same result.
"""

import logging
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from polyreme.api.v1 import weights_pb2
from polyreme.net.torch_store import narrow_stores
from polyreme.weights.manifest import ArenaSource, Manifest
from polyreme_rollout.engine.arena_cache import ArenaCache
from polyreme_rollout.engine.inspection import digests, expert_layers, hf_names
from polyreme_rollout.engine.learned_copies import CopyRecorder, LearnedCopies, Tensors, fingerprint, learn, may_learn, same
from polyreme_rollout.engine.named_tensors import named_tensors

# At every swap it warns about layers without separate weights (rotary tables, a tied head). We check coverage by names.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

logger = logging.getLogger(__name__)

narrow_stores(import_module("torch.distributed.rendezvous"))  # vLLM imports this module in each worker before it makes a store


class PolicyWorker:
    """Methods named polyreme_*: vLLM refuses an extension whose names clash with its worker's."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    device: torch.device
    polyreme_arenas: ArenaCache | None = None
    polyreme_half_loaded: bool = False
    polyreme_copies: LearnedCopies | None = None
    polyreme_has_learned: bool = False

    def polyreme_prepare(self) -> None:
        """Makes the worker ready for requests. Called once, before the first one."""
        if self.device.type == "cpu" and self.vllm_config.scheduler_config.enable_chunked_prefill:
            spare_generators(self.model_runner)

    def polyreme_weight_names(self) -> list[str]:
        """Hugging Face names of the tensors of this worker's model, without aliases."""
        return sorted(hf_names(self.model_runner.model))

    def polyreme_digests(self) -> dict[str, Any]:
        """Returns {"weights": {vLLM's name: (shape, xxh3_64) of this rank's weights}} or {"error"}."""
        try:
            with set_current_vllm_config(self.vllm_config):
                return {"weights": digests(self.model_runner.model)}
        except Exception as error:  # noqa: BLE001 - the answer carries it
            return {"error": f"{type(error).__name__}: {error}"}

    def polyreme_free_bytes(self) -> int:
        """Free memory of this worker's device."""
        return int(getattr(torch, self.device.type).mem_get_info()[0])

    def polyreme_load(self, parts: list[tuple[str, bytes, int, int, bytes]]) -> dict[str, object]:
        """Loads a version from its parts, each as (path, nonce, slot, generation, serialized manifest).

        Returns:
            {"started": as time.perf_counter(), "seconds", "sampled": number of tokens of each request} or {"error", "traceback"}.
        """
        started = time.perf_counter()
        try:
            if self.polyreme_half_loaded:
                _clear_load_buffers(self.model_runner.model)
                self._polyreme_finalize()
            self.polyreme_half_loaded = True
            self._polyreme_reload(parts)
            self.polyreme_half_loaded = False
        except Exception as error:  # noqa: BLE001 - the answer carries it
            return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        sampled = {id: len(state.output_token_ids) for id, state in self.model_runner.requests.items()}
        return {"started": started, "seconds": time.perf_counter() - started, "sampled": sampled}

    def _polyreme_reload(self, parts: list[tuple[str, bytes, int, int, bytes]]) -> None:
        if self.polyreme_arenas is None:
            self.polyreme_arenas = ArenaCache(self.device.type)
        model = self.model_runner.model
        sources = [
            ArenaSource(path, nonce, slot, generation, Manifest.from_proto(weights_pb2.Manifest.FromString(manifest)))
            for path, nonce, slot, generation, manifest in parts
        ]
        with named_tensors(sources, self.polyreme_arenas) as tensors:
            with set_current_vllm_config(self.vllm_config), _default(self.device), torch.no_grad():
                if self.polyreme_copies is not None and self.polyreme_copies.fit(tensors):
                    self.polyreme_copies.load(tensors)
                    _pack_tied_head(model)
                elif self.polyreme_has_learned:
                    self._polyreme_load_layers(tensors)
                else:
                    self._polyreme_learn(tensors)
            torch.accelerator.synchronize()

    def _polyreme_load_layers(self, tensors: Tensors) -> None:
        """vLLM's own reload."""
        model = self.model_runner.model
        _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        model.load_weights(iter(tensors.items()))
        self._polyreme_finalize()
        _pack_tied_head(model)
        if self.device.type != "npu":  # vllm-ascend computes experts without vLLM's kernel
            _check_expert_kernels(model)

    def _polyreme_learn(self, tensors: Tensors) -> None:
        """Runs vLLM's own reload, and records it for later loads if possible: on CPU, on one rank."""
        model, one_rank = self.model_runner.model, self.vllm_config.parallel_config.world_size == 1
        can_record = self.device.type == "cpu" and one_rank and may_learn(model)
        recorder = CopyRecorder(model, tensors)
        with recorder if can_record else nullcontext():
            self._polyreme_load_layers(tensors)
        self.polyreme_has_learned = True
        copies = learn(recorder, tensors) if can_record else None
        if copies is None:
            return
        expected = fingerprint(model)
        copies.load(tensors)
        _pack_tied_head(model)
        if same(fingerprint(model), expected):
            self.polyreme_copies = copies
        else:
            logger.warning("recorded copies do not repeat vLLM's reload of this model; each swap uses vLLM's reload")
            self._polyreme_load_layers(tensors)

    def _polyreme_finalize(self) -> None:
        with set_current_vllm_config(self.vllm_config), _default(self.device), torch.no_grad():
            finalize_layerwise_reload(self.model_runner.model, self.model_config)


def _default(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` torch's default. The CPU needs no context; there, a context would cost a quarter of a load."""
    return nullcontext() if device.type == "cpu" else device


def _clear_load_buffers(model: torch.nn.Module) -> None:
    """Drops the tensors that a failed load buffered for incomplete layers. Finalizing would load them again, and fail again."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Makes a reload pack the experts again. vLLM considers a layer with a kernel packed, and would leave plain weights in it."""
    for layer in expert_layers(model).values():
        layer.quant_method.moe_kernel = None


def _check_expert_kernels(model: torch.nn.Module) -> None:
    """Raises RuntimeError when a reload left experts without a kernel."""
    for path, layer in expert_layers(model).items():
        if layer.quant_method.moe_kernel is None:
            raise RuntimeError(f"expected packed experts in {path}; found no kernel after the reload")


def _pack_tied_head(model: torch.nn.Module) -> None:
    """Packs a tied head again. A reload leaves its packed copy (CPU) stale, and every token would come from the old head."""
    head: Any = getattr(model, "lm_head", None)
    if getattr(model.config, "tie_word_embeddings", False) and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


class DiscardedDraw(torch.Generator):
    """A generator for draws that are discarded: setting it back does nothing.

    vLLM's sampler also draws for a prompt that a step leaves incomplete, discards the draw, and sets the request's generator back
    by an offset. torch's generators have no offset on CPU, so the engine would crash.
    """

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def spare_generators(runner: Any) -> None:
    """Makes a model runner of vLLM on CPU draw for incomplete prompts from `DiscardedDraw`. Call it once. A seeded sample is then
    the same whether its prompt was computed in one step or in several."""
    sample_tokens = runner.sample_tokens

    def sampling(*arguments: object, **options: object) -> object:
        generators, running = runner.input_batch.generators, runner.input_batch.num_reqs
        incomplete = np.flatnonzero(runner.discard_request_mask.np[:running]).tolist()
        spared = {place: generators[place] for place in incomplete if place in generators}
        generators.update({place: DiscardedDraw() for place in spared})
        try:
            return sample_tokens(*arguments, **options)
        finally:
            generators.update(spared)

    runner.sample_tokens = sampling
