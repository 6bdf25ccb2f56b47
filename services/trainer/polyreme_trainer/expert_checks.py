"""The check of the settings for models with experts, before anything starts.

Invariant: a setting that does not apply to the model is an error and is never ignored. This module imports no torch.
"""

from collections.abc import Iterator

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme_trainer.megatron.huggingface.families import load_architecture

SILENT_ENGINES = ("vllm",)
"""The engines of this distribution that report no routes. For any other engine, the replica checks this when it starts."""


def check_experts(config: RunConfig | StageConfig) -> Iterator[PolyremeError]:
    """Yields an error for each setting that needs experts where the model has none. Raises ConfigError for a model that is unknown."""
    arch = load_architecture(config.model.path)
    replays = isinstance(config, RunConfig) and config.trainer.moe.replay_routes
    if (config.trainer.moe.is_set or replays) and not arch.experts:
        yield ConfigError("a model with experts, for trainer.moe", f"{arch.family.name}, which is dense", "Remove trainer.moe.")
    if config.trainer.moe.bias_update_rate and arch.experts and arch.family.scores != "sigmoid":
        yield ConfigError(
            "a model with an expert bias, for trainer.moe.bias_update_rate",
            f"{arch.family.name}, which has none",
            "Remove trainer.moe.bias_update_rate; trainer.moe.aux_loss_coef balances these experts.",
        )
    if config.trainer.moe.bias_update_rate and config.trainer.lora is not None:
        yield ConfigError(
            "trainer.moe.bias_update_rate: 0 with trainer.lora, whose base model is frozen with its expert biases",
            f"{config.trainer.moe.bias_update_rate:g}",
            "Remove one of the two.",
        )
    if isinstance(config, RunConfig) and replays and config.rollout.engine in SILENT_ENGINES:
        yield ConfigError(
            "an engine that reports the experts that it chooses, for trainer.moe.replay_routes",
            f"rollout.engine: {config.rollout.engine}, which does not",
            "Remove trainer.moe.replay_routes, or use an engine that reports its routes.",
        )
    if isinstance(config, RunConfig) and arch.experts and (config.device, config.placement) == ("npu", "colocated"):
        yield ConfigError(
            "placement: separate for a model with experts on npu",
            "placement: colocated",
            "Use separate devices: a wake in vllm-ascend transposes the experts, and a load would not fit them.",
        )
