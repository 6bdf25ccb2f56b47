"""Systems that are not imported are named, with what to do."""

import pytest

from polyreme.errors import ConfigError
from support.imports import import_text

DEEPSPEED = "deepspeed --num_gpus 8 main.py --data_path Dahoas/rm-static --data_split 2,4,4 "
PRIME = 'max_steps = 20\n[model]\nname = "Qwen/Qwen3-0.6B"\n[orchestrator]\nbatch_size = 128\ngroup_size = 8\n[inference.model]\nx = 1\n'


@pytest.mark.parametrize(
    ("text", "suffix", "system", "what"),
    [
        (f"{DEEPSPEED}--actor_model_name_or_path $A --critic_model_name_or_path $C --actor_learning_rate 9.65e-6 --ppo_epochs 1\n",
         ".sh", "DeepSpeed-Chat, step 3", "algorithm.preset: ppo"),
        (f"{DEEPSPEED}--model_name_or_path facebook/opt-350m --num_padding_at_beginning 1 --learning_rate 5e-5\n",
         ".sh", "DeepSpeed-Chat, step 1 or 2", "polyreme reward-model"),
        (f"{DEEPSPEED}--model_name_or_path facebook/opt-1.3b --learning_rate 5e-5\n", ".sh", "DeepSpeed-Chat", "polyreme sft"),
        ("deepspeed --module openrlhf.cli.train_opd --model.model_name_or_path m --teacher.model_name_or_path t --opd.topk 0 --adam.lr 1e-6\n",
         ".sh", "train_opd", "algorithm.preset: distillation"),
        (PRIME, ".toml", "prime-rl", "orchestrator.batch_size"),
        ('batch_size = 16\nseq_len = 128\n[[env]]\nid = "reverse-text"\n', ".toml", "prime-rl", "environment.file"),
        ("uv run rl @ examples/reverse_text/rl.toml --ckpt\n", ".sh", "prime-rl", "polyreme init"),
        ('[project]\nname = "x"\n', ".toml", "TOML", "No system"),
        ("a = [", ".toml", "Invalid value", "Python script of TRL"),
    ],
)  # fmt: skip
def test_a_system_that_is_not_imported(text: str, suffix: str, system: str, what: str) -> None:
    with pytest.raises(ConfigError) as error:
        import_text(text, suffix=suffix)
    assert system in str(error.value) and what in str(error.value)


def test_gpg_of_verl_is_said_to_be_grpo_times_a_factor() -> None:
    with pytest.raises(ConfigError, match=r"samples whose score is not 0.*norm_adv_by_std_in_grpo: false"):
        import_text("{algorithm: {adv_estimator: gpg}, actor_rollout_ref: {actor: {policy_loss: {loss_mode: gpg}}}}", "verl")
