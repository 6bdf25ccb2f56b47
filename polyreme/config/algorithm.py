"""The section `algorithm`: how samples and scores become a loss."""

from typing import Literal

from pydantic import Field

from polyreme.config.section import Section


class AlgorithmConfig(Section):
    name: Literal["grpo"] = Field("grpo", description="The algorithm.")
    clip_low: float = Field(0.2, gt=0, description="The probability ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="The probability ratio is clipped above 1 + clip_high.")
    kl_coef: float = Field(0.0, ge=0, description="Weight of the k3 KL to the reference policy. 0: no reference model is loaded.")
    normalize_std: bool = Field(
        True, description="Divide a group's advantages by their standard deviation (GRPO). false: Dr.GRPO."
    )
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over an iteration's samples.")
    epochs: int = Field(1, ge=1, description="Passes over an iteration's samples.")
    importance_sampling: Literal["auto", "token", "none"] = Field(
        "auto",
        description="Correction for samples of other policies: truncated weights per token. auto: where max_staleness > 0.",
    )
    importance_cap: float = Field(2.0, ge=1, description="Largest importance weight.")
