"""The section `rollout`: how samples are generated, and what a replica takes on."""

from pydantic import Field

from polyreme.config.section import Operational, Section


class VllmConfig(Section):
    """Options of vLLM alone. No other part reads them."""

    kv_cache_mib: int = Field(256, ge=1, description="Key-value cache of a CPU replica. GPUs use gpu_memory_utilization.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="Fraction of an accelerator's memory that vLLM may use.")
    threads: int = Field(1, ge=1, description="OpenMP threads of each engine worker on CPU.")


class RolloutConfig(Section):
    engine: str = Field("vllm", description="Inference engine: a name in the entry-point group `polyreme.engines`.")
    replicas: Operational[int] = Field(1, ge=1, description="Replicas that `polyreme up` starts and that a run waits for.")
    tensor_parallel: int = Field(1, ge=1, description="Devices that share one replica's model.")
    max_new_tokens: int = Field(ge=1, description="Longest response, in tokens.")
    max_model_len: int = Field(ge=2, description="Longest prompt plus response, in tokens.")
    temperature: float = Field(
        1.0,
        ge=0.01,
        le=2,
        description="Sampling temperature in training, within the range that vLLM takes unchanged. The learner uses the same.",
    )
    max_num_seqs: int = Field(256, ge=1, description="Samples that a replica decodes at once.")
    start_timeout: Operational[float] = Field(300.0, gt=0, description="Seconds until enough replicas must be registered.")
    chunk_timeout: Operational[float] = Field(60.0, gt=0, description="Seconds that a generation stream may stay silent.")
    vllm: VllmConfig = VllmConfig()
