"""The section `rollout`: how samples are generated, and the capacity of a replica.

Invariant: options of one engine are in a section of that engine; all other keys apply to every engine.
"""

from typing import Literal

from pydantic import Field, model_validator

from polyreme.config.section import Operational, Section


class NgramConfig(Section):
    """Speculative decoding without a second model: proposes the tokens after the same n-gram earlier in prompt or response."""

    method: Literal["ngram"] = Field("ngram", description="How tokens are proposed.")
    tokens: int = Field(3, ge=1, le=16, description="Number of tokens that are proposed and then verified in one step.")
    shortest: int = Field(2, ge=1, le=16, description="Minimum length of the n-gram, in tokens.")
    longest: int = Field(4, ge=1, le=16, description="Maximum length of the n-gram, in tokens.")

    @model_validator(mode="after")
    def _in_order(self) -> "NgramConfig":
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} must not exceed longest = {self.longest}")
        return self


class VllmConfig(Section):
    """Options of vLLM. No other engine reads them."""

    kv_cache_mib: int = Field(
        256, ge=1, description="Key-value cache of a CPU replica, in MiB. Accelerators use gpu_memory_utilization."
    )
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Fraction of an accelerator's memory that vLLM may use.")
    threads: int = Field(1, ge=1, description="OpenMP threads per engine worker on CPU.")
    prefix_caching: Operational[bool] = Field(
        True,
        description="Whether the samples of a group share the computation of their prompt. Each new version clears the cache.",
    )
    chunked_prefill: Operational[bool | None] = Field(
        None,
        description="Whether a long prompt is computed in several steps, between the tokens of other samples. null: only on"
        " accelerators.",
    )
    max_num_batched_tokens: Operational[int | None] = Field(
        None,
        ge=1,
        description="Maximum number of tokens of a step, prompts included; with chunked_prefill, also of a prompt's chunk. null:"
        " 8192, or max_model_len or max_num_seqs + 1 if that is larger.",
    )
    speculative: NgramConfig | None = Field(
        None,
        description="Speculative decoding, only on accelerators. The gates before training check its log-probabilities. null:"
        " none.",
    )
    max_loras: Operational[int | None] = Field(
        None,
        ge=0,
        description="Maximum number of adapters that a training service samples from at the same time. 0: none; each model is"
        " merged into the weights and loaded alone. null: on CPU, as many as a sixteenth of the key-value cache's memory holds,"
        " from 1 to 32; none on accelerators and for a model with experts.",
    )
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256] = Field(
        32, description="Maximum rank of these adapters. A model with a higher one is merged and loaded alone."
    )
    sleep_level: Operational[Literal[1, 2]] = Field(
        1,
        description="How an accelerator's memory is freed of weights while a colocated learner trains. 1: they move to the"
        " host's memory. 2: they are dropped, and loaded again afterwards.",
    )


class TransformersConfig(Section):
    """Options of the transformers engine. No other engine reads them."""

    threads: int = Field(1, ge=1, description="Threads of torch on CPU.")


class RolloutConfig(Section):
    engine: str = Field(
        "vllm",
        description="Inference engine: vllm, or transformers (plain Hugging Face: slow and exact, for tests, models that vLLM"
        " does not serve and machines without vLLM), or another name in the entry-point group `polyreme.engines`.",
    )
    replicas: Operational[int] = Field(1, ge=1, description="Number of replicas that `polyreme up` starts and a run waits for.")
    tensor_parallel: int = Field(1, ge=1, description="Devices per replica.")
    cpu_sleep: Operational[Literal["pause", "end"]] = Field(
        "pause",
        description="What a CPU replica does while a colocated learner trains. pause: it keeps its memory and uses no processor"
        " time. end: its engine ends, which frees the memory, and starts again in the next turn.",
    )
    max_new_tokens: int = Field(ge=1, description="Maximum response length in tokens.")
    tokens_per_iteration: int | None = Field(
        None,
        ge=1,
        description="Token budget of a sample in an iteration (partial rollouts). A longer response pauses, and the next version"
        " continues it, up to max_staleness. null: no limit.",
    )
    max_model_len: int = Field(ge=2, le=10**9, description="Maximum length of prompt plus response, in tokens.")
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=2,
        description="Sampling temperature in training, within the range that vLLM uses unchanged. The learner uses the same"
        " value for samples, and 1 for supervised rows.",
    )
    max_num_seqs: int = Field(256, ge=1, description="Maximum number of samples that a replica decodes at once.")
    start_timeout: Operational[float] = Field(300.0, gt=0, description="Maximum seconds for the replicas' registration.")
    chunk_timeout: Operational[float] = Field(
        60.0, gt=0, description="Maximum seconds between two chunks of a generation stream."
    )
    vllm: VllmConfig = VllmConfig()
    transformers: TransformersConfig = TransformersConfig()
