"""All stages by their names in the configuration.

Invariant: the names are those of `polyreme.config.stage.STAGES`.
"""

from polyreme_trainer.stages.preference import PREFERENCE
from polyreme_trainer.stages.reward_model import REWARD_MODEL
from polyreme_trainer.stages.supervised import SUPERVISED

TABLE = {"sft": SUPERVISED, "reward-model": REWARD_MODEL, "dpo": PREFERENCE}
