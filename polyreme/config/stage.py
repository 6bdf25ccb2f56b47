"""The configuration of a stage: supervised, reward-model or preference training, without rollouts, rewards and iterations.

Invariant: a stage reads every key of its schema. A key of one stage or one loss is in no other schema.
"""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from polyreme.config.base import BaseConfig
from polyreme.config.data import TextConfig
from polyreme.config.model import ModelConfig
from polyreme.config.named_input import MODEL
from polyreme.config.section import Operational, Section
from polyreme.config.trainer import CommonTrainer, MoeConfig


class StageTrainer(CommonTrainer):
    """Ranks, optimizer, batches and checkpoints of a stage."""

    moe: MoeConfig = MoeConfig()
    batch_size: int = Field(ge=1, description="Rows per optimizer step.")
    epochs: Operational[float] = Field(1.0, gt=0, description="Passes over the data when `steps` is null.")
    steps: Operational[int | None] = Field(None, ge=1, description="Number of optimizer steps. null: set by `epochs`.")
    eval_interval: Operational[int] = Field(
        0, ge=0, description="Steps between evaluations. 0: only before the first step and after the last."
    )
    max_restarts: Operational[int] = Field(
        3,
        ge=0,
        description="Maximum restarts of the ranks after one of them dies. The count resets after five minutes of healthy"
        " uptime.",
    )

    @model_validator(mode="after")
    def _fits(self) -> "StageTrainer":
        if self.parallel.nodes > 1:
            raise ValueError("`parallel.nodes` must be 1: a stage runs on one machine")
        if self.optimizer.min_lr > self.optimizer.lr:
            raise ValueError("`optimizer.min_lr` is above `optimizer.lr`")
        return self


class ConversationData(TextConfig):
    """Prompts with answers."""

    max_tokens: int = Field(1024, ge=2, le=10**9, description="Maximum conversation length in tokens.")
    overlong: Literal["filter", "error"] = Field("filter", description="What to do with a row longer than max_tokens.")


class SftData(ConversationData):
    """Conversations. A row has a prompt and a response, or the messages of several turns."""

    response_key: str = Field("response", description="Column with the answer.")
    messages_key: str = Field(
        "messages",
        description="Column with a whole conversation. Every answer in it is trained on. A row has this column, or prompt and"
        " response.",
    )


class PairData(ConversationData):
    """Pairs of answers to one prompt."""

    chosen_key: str = Field("chosen", description="Column with the better answer: a text, or a list of one assistant message.")
    rejected_key: str = Field("rejected", description="Column with the worse answer, in the same form.")


class RewardModelData(PairData):
    """Pairs of answers to one prompt."""

    margin_key: str | None = Field(
        None, description="Column with the margin: the difference that the scores of a pair should exceed. null: no margin."
    )
    tie_key: str | None = Field(
        None, description="Column that is true when neither answer is better. null: only equal answers are ties."
    )


class PreferenceData(PairData):
    """Pairs of answers to one prompt; for kto, single answers that are good or bad."""

    response_key: str = Field("response", description="For kto: column with the answer.")
    label_key: str = Field("label", description="For kto: column that is true for a good answer and false for a bad one.")


class LossSection(Section):
    """A preference loss.

    Attributes:
        needs_reference: whether it compares with a reference.
    """

    needs_reference: ClassVar[bool] = True


class Dpo(LossSection):
    """Direct preference optimisation; with label smoothing, conservative DPO."""

    kind: Literal["dpo"] = Field("dpo", description="The name of this loss.")
    beta: float = Field(0.1, gt=0, description="Strength of the regularization towards the reference.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed probability that the two answers of a pair are swapped."
    )


class Ipo(LossSection):
    """Identity preference optimisation: a squared error instead of a log-sigmoid."""

    kind: Literal["ipo"] = Field("ipo", description="The name of this loss.")
    beta: float = Field(0.1, gt=0, description="Strength of the regularization towards the reference.")
    per_token: bool = Field(
        True, description="true: the mean log-ratio per token, as most trainers do. false: the sum, as in the paper."
    )


class Kto(LossSection):
    """Kahneman-Tversky optimisation: good and bad answers, not paired."""

    kind: Literal["kto"] = Field("kto", description="The name of this loss.")
    beta: float = Field(0.1, gt=0, description="Strength of the regularization towards the reference.")
    desirable_weight: float = Field(1.0, ge=0, description="Weight of good answers.")
    undesirable_weight: float = Field(1.0, ge=0, description="Weight of bad answers.")


class SimPo(LossSection):
    """Simple preference optimisation: mean log-probabilities, and no reference."""

    needs_reference: ClassVar[bool] = False

    kind: Literal["simpo"] = Field("simpo", description="The name of this loss.")
    beta: float = Field(2.0, gt=0, description="Scale of the difference of mean log-probabilities.")
    gamma: float = Field(0.5, ge=0, description="Target difference of the scaled mean log-probabilities.")


class OrPo(LossSection):
    """Odds-ratio preference optimisation: supervised training and a penalty in one, and no reference."""

    needs_reference: ClassVar[bool] = False

    kind: Literal["orpo"] = Field("orpo", description="The name of this loss.")
    beta: float = Field(0.1, gt=0, description="Weight of the odds ratio beside the supervised loss.")


PreferenceLoss = Annotated[Dpo | Ipo | Kto | SimPo | OrPo, Field(discriminator="kind")]


class StageConfig(BaseConfig):
    """The configuration that all stages share."""

    checkpoint_prefix: ClassVar[str] = "step"

    stage: str = Field(description="The stage that this file configures.")
    model: ModelConfig
    data: ConversationData
    trainer: StageTrainer

    @property
    def title(self) -> str:
        """The stage's name in messages."""
        return self.stage

    def shares_reference(self, path: Path) -> bool:
        """Whether a reference from this directory is the trained model without its adapters, in the same memory."""
        return self.trainer.lora is not None and path == self.model.path

    def decisive_length(self) -> dict[str, object]:
        trainer = self.trainer
        return {} if trainer.optimizer.schedule == "constant" else {"steps": trainer.steps, "epochs": trainer.epochs}


class SftConfig(StageConfig):
    """Supervised training: the cross entropy of answers."""

    stage: Literal["sft"] = Field(description="The stage that this file configures.")
    data: SftData


class RewardModelConfig(StageConfig):
    """A reward model from pairs of answers: a score at the end of a conversation."""

    stage: Literal["reward-model"] = Field(description="The stage that this file configures.")
    ties: Literal["skip", "half"] = Field("skip", description="skip: ties are left out. half: a tie counts half in either order.")
    center_coef: float = Field(0.0, ge=0, description="Weight of the squared sum of a pair's scores. It keeps scores around 0.")
    data: RewardModelData

    @model_validator(mode="after")
    def _as_served(self) -> "RewardModelConfig":
        if self.data.system is not None:
            raise ValueError(
                "data.system must be null: the reward service scores a row without the run's system message; write it into the"
                " rows"
            )
        return self


class DpoConfig(StageConfig):
    """Preference training without a reward model."""

    stage: Literal["dpo"] = Field(description="The stage that this file configures.")
    loss: PreferenceLoss = Dpo()
    reference: Annotated[Path | None, MODEL] = Field(
        None, description="Hugging Face directory or name of the reference. null: the initial model."
    )
    data: PreferenceData

    @model_validator(mode="after")
    def _fits(self) -> "DpoConfig":
        if self.loss.kind == "kto" and self.trainer.batch_size < 2:
            raise ValueError(
                "trainer.batch_size must be 2 or more for kto: its baseline pairs each prompt with another row's answer"
            )
        if self.reference is not None and not self.loss.needs_reference:
            raise ValueError(f"reference must be null: {self.loss.kind} has none")
        return self

    @property
    def title(self) -> str:
        return f"{self.stage} with the loss {self.loss.kind}"


STAGES: dict[str, type[StageConfig]] = {"sft": SftConfig, "reward-model": RewardModelConfig, "dpo": DpoConfig}
"""The schema of each stage, by the file's key `stage`."""
