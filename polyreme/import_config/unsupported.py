"""Configurations of systems that are recognised and not imported, with what to do instead.

Invariant: none of them is read as one of a system whose keys have the same names. Pure.
"""

from collections.abc import Mapping

from polyreme.errors import ConfigError

_DEEPSPEED_PPO = (
    "Polyreme has its algorithm, PPO with a critic and a reward model: write the run with `polyreme init` and algorithm.preset: ppo. "
    "actor_learning_rate is trainer.optimizer.lr, critic_learning_rate trainer.critic.optimizer.lr, max_prompt_seq_len data.max_prompt_tokens, "
    "max_answer_seq_len rollout.max_new_tokens, ppo_epochs algorithm.epochs, unsup_coef algorithm.ptx.coef (with enable_unsupervised); "
    "its code has a KL of 0.1 in the reward, scores within 5, lam 0.95, and clips of 0.2."
)
_OPD = (
    "Polyreme has distillation by a policy gradient: write the run with `polyreme init`, algorithm.preset: distillation and a section "
    "`teacher` (docs/algorithms.md#distillation). That is --opd.topk 0 with the estimator k1; the KL over the top k tokens and the "
    "other estimators have no counterpart."
)
_PRIME = (
    "Write the run with `polyreme init`: groups_per_iteration is orchestrator.batch_size / its group size (group_size, rollouts_per_example), "
    "max_staleness its max_async_level, iterations max_steps. Its environments (verifiers) become a reward (docs/rewards.md), "
    "or with several turns an environment.file (docs/environments.md); choose algorithm.preset yourself, since its loss depends on the version."
)


def refuse(values: Mapping[str, object], program: str, where: str) -> None:
    """Raises ConfigError for the command line of DeepSpeed-Chat or of OpenRLHF's `train_opd`."""
    if "train_opd" in program:
        raise _error(where, "OpenRLHF's train_opd, on-policy distillation", _OPD)
    keys = {key.replace("-", "_") for key in values}
    if "actor_model_name_or_path" in keys and keys & {"actor_zero_stage", "actor_learning_rate", "max_answer_seq_len"}:
        raise _error(where, "DeepSpeed-Chat, step 3 (PPO)", _DEEPSPEED_PPO)
    if {"data_path", "data_split", "model_name_or_path"} <= keys:
        stage = "`polyreme reward-model`" if "num_padding_at_beginning" in keys else "`polyreme sft`"
        raise _error(where, "DeepSpeed-Chat, step 1 or 2", f"This training is a stage: {stage} (docs/stages.md).")


def refuse_toml(tree: Mapping[str, object], where: str) -> ConfigError:
    """The error for a TOML file."""
    if tree.keys() & {"orchestrator", "inference"} or tree.keys() >= {"batch_size", "seq_len"} or "trainer" in tree:
        return _error(where, "prime-rl", _PRIME)
    return ConfigError(
        f"YAML, JSON, a shell script or a script of TRL at {where}", "TOML", "No system with TOML files can be imported."
    )


def refuse_prime_rl(where: str) -> ConfigError:
    """The error for a script that starts prime-rl."""
    return _error(where, "prime-rl", _PRIME)


def _error(where: str, system: str, what: str) -> ConfigError:
    return ConfigError(
        f"a configuration of verl, MindSpeed RL, TRL, OpenRLHF or PaddleNLP in {where}",
        f"one of {system}, which is not imported",
        what,
    )
