"""The fate of each of PaddleNLP's keys, and its batch arithmetic: prompts, samples, optimizer steps and iterations.

Each optimizer step of `PPOTrainer.train` is a global step, which `max_steps`, `save_steps`, `eval_steps` and the schedule count.

Invariant: a pattern with `*` says "no effect on training" only where that is true of every key below it.
"""

import math

from polyreme.import_config.convert import NAME_OR_PATH, given, minibatches, name, overlong, path, product, ratio, trackers
from polyreme.import_config.rules import WHOLE, Noted, Off, Rule, Values, idle, lost, one_of, part_of, unless_off

CRITIC = ("ppo", "vapo")
"""Algorithms with a critic."""
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}


def samples(values: Values) -> int:
    """Samples of a prompt."""
    return int(values.get("rollout_n") or values.get("num_return_sequences") or 1)


def prompts(values: Values) -> int:
    """Prompts of an iteration."""
    if values.get("global_batch_size"):
        return int(values["global_batch_size"])
    return product(values["per_device_prompt_batch_size"], values.get("sharding_parallel_degree"))


def minibatches_of(values: Values) -> tuple[int, str]:
    """Optimizer steps of a pass over an iteration's samples, and their origin."""
    size = values.get("global_mini_batch_size")
    if size:
        why = "global_batch_size / global_mini_batch_size, both in prompts"
        return minibatches(prompts(values), size, why) if size > 0 else (1, why)
    step = product(
        values["per_device_train_batch_size"], values["gradient_accumulation_steps"], values.get("sharding_parallel_degree")
    )
    steps = ratio(prompts(values) * samples(values), step)
    return min(prompts(values), steps), "samples per generation / samples per optimizer step"


def per_iteration(values: Values) -> int:
    """Optimizer steps of an iteration."""
    return minibatches_of(values)[0] * int(values.get("update_iters") or 1)


def iterations(value: object, values: Values) -> object:
    """Optimizer steps as iterations, rounded up: PaddleNLP counts each step and stops after the iteration with the last one."""
    steps = per_iteration(values)
    if not isinstance(value, int | float) or value <= 0:
        return Off()
    return math.ceil(value / steps) if steps == 1 else Noted(math.ceil(value / steps), f"/ {steps} optimizer steps per iteration")


def interval(value: object, values: Values) -> object:
    """Optimizer steps between two saves or evaluations as iterations; 0: never."""
    return ratio(value, per_iteration(values)) if isinstance(value, int | float) and value > 0 else 0


def _without_critic(values: Values) -> str:
    return "" if values["rl_algorithm"] in CRITIC else "no critic in this algorithm"


_of_critic = unless_off(_without_critic, given)
_schedule = one_of(SCHEDULES, None)


def _recompute(value: object, values: Values) -> object:
    if not value:
        return Off("nothing is recomputed")
    return "full" if values.get("recompute_granularity", "full") == "full" else "selective"


def _offload(value: object, values: Values) -> object:
    words = str(value or "").replace(",", " ").split()
    found = {"optimizer": "optimizer" in words, "idle_models": bool({"freeze_model", "train_model", "eval", "reward"} & {*words})}
    return {key: True for key, wanted in found.items() if wanted} or Off("nothing is offloaded")


def _constant(values: Values) -> str:
    return "the rate is constant" if str(values.get("lr_scheduler_type")).startswith("constant") else ""


TRAINING = (
    Rule("actor_model_name_or_path", "model.path", f"CHECK: {NAME_OR_PATH}", path),
    Rule("critic_model_name_or_path", "trainer.critic.path", f"CHECK: {NAME_OR_PATH}",
         lambda value, values: path(found, values) if isinstance(found := _of_critic(value, values), str) else found),
    *part_of("algorithm.preset", "rl_algorithm"),
    Rule("update_iters", "algorithm.epochs"),
    *part_of("algorithm.loss", "clip_range_ratio", "clip_range_ratio_low", "clip_range_ratio_high"),
    Rule("clip_range_value", "algorithm.advantage.value_clip", "", _of_critic),
    Rule("clip_range_score", "algorithm.shaping.clip", "scores within both signs of it", lambda value, _: [-value, value]),
    Rule("entropy_coeff", "algorithm.entropy_coef"),
    Rule("normalize_reward", "algorithm.shaping.normalise", "",
         lambda value, values: bool(value) if values["rl_algorithm"] != "grpo" else Off("PaddleNLP never does with grpo")),
    *part_of("algorithm.advantage.whiten", "normalize_advantage"),
    Rule("dynamic_sampling", "algorithm.dynamic_sampling"),
    *part_of("algorithm.kl", "kl_coeff", "kl_loss_coeff"),
    *part_of("trainer.optimizer", "learning_rate", "min_learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
             "adam_epsilon", "max_grad_norm", "warmup_ratio", "warmup_steps"),
    Rule("lr_scheduler_type", "trainer.optimizer.schedule", "", _schedule),
    *part_of("trainer.critic.optimizer", "critic_learning_rate", "critic_min_learning_rate", "critic_weight_decay",
             "critic_warmup_ratio", "critic_warmup_steps"),
    Rule("critic_lr_scheduler_type", "trainer.critic.optimizer.schedule", "", unless_off(_without_critic, _schedule)),
    *lost("the rate falls until the last iteration", "decay_steps", "critic_decay_steps", unless=(None, -1), off=_constant),
    *lost("a fall has one form here", "num_cycles", "lr_end", "power", off=_constant),
    *lost("the optimizer is AdamW", "optim", unless=(None, "adamw")),
    Rule("pretrain_critic_steps", "trainer.critic.warmup_iterations", "", _of_critic),
    *lost("PaddleNLP has no such option: its discount is 1", "gamma", unless=(None, 1)),
    *lost("PaddleNLP has no such option: its lambda is 0.95", "gae_lambda", "lam", unless=(None, 0.95)),
    *idle("an option of PaddleNLP's scripts for inference, which its training does not read", "rollout_input_batch_size"),
    *lost("the weight of the policy's loss is 1", "pg_loss_coeff", unless=(None, 1)),
    *lost("set algorithm.ptx with data, coef and batch_size", "ptx_coeff", unless=(None, 0)),
    *lost("set algorithm.ptx with data, coef and batch_size", "ptx_datasets", "ptx_task_config", unless=(None, ""),
          off=lambda values: "" if values.get("ptx_coeff") else "only used with ptx_coeff"),
    *lost("there is no dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", unless=(None, 0)),
    *idle("only used with dropout", "dropout_warmup_steps"),
    *lost("the KL has no weights of its own", "use_tgt_len_value", unless=(None, False)),
    *lost("weights are float32 or bfloat16", "fp16", unless=(None, False)),
    *part_of("model.dtype", "bf16"),
    *part_of("iterations", "num_train_epochs"),
    Rule("max_steps", "iterations", "optimizer steps; -1: num_train_epochs counts", iterations),
    *part_of("groups_per_iteration", "global_batch_size", "per_device_prompt_batch_size"),
    *part_of("group_size", "rollout_n", "num_return_sequences"),
    *part_of("algorithm.minibatches", "global_mini_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
    Rule("seed", "seed"),
    Rule("enable_overlong_reward_buffer", "algorithm.shaping.overlong",
         "overlong_reward_buffer / max_dec_len, with overlong_penalty_factor",
         overlong("overlong_reward_buffer", "max_dec_len", "overlong_penalty_factor", 256)),
    *part_of("algorithm.shaping.overlong", "overlong_reward_buffer", "overlong_penalty_factor"),
    *part_of("reward.rewards", "reward_model_name_or_path", "reward_server", "use_rm_server", "use_rule_reward"),
)  # fmt: skip

DATA = (
    Rule("train_datasets", "data.train", "CHECK: a file on this machine", path),
    Rule("eval_datasets", "data.eval", "CHECK: a file on this machine", path),
    Rule("max_prompt_len", "data.max_prompt_tokens", "CHECK: longer prompts are left out; PaddleNLP cuts them"),
    Rule("max_dec_len", "rollout.max_new_tokens"),
    Rule("temperature", "rollout.temperature"),
    *lost(WHOLE, "top_p", "repetition_penalty", unless=(None, 1)),
    *lost(WHOLE, "top_k", unless=(None, 0, -1)),
    *lost("a response may end at its first token", "min_dec_len", unless=(None, 0, 1)),
    *lost("replicas have the learner's weights", "rollout_quant_type", unless=(None, "")),
    *lost("the stop tokens of generation_config.json end a response", "eos_token", unless=(None, "")),
    *lost("set data.template: chat, or put the template into the tokenizer's files", "chat_template", unless=(None, "none", "")),
    *lost("prompts have one tokenization",
          *(f"{role}_tokenizer_alpha" for role in ("actor", "reward", "critic", "reward_critic")), unless=(None, 0)),
    *lost("CHECK: list its files and their weights in data.train", "train_task_config", unless=(None, "")),
    *lost("list its files in data.eval", "eval_task_config", unless=(None, "")),
    Rule("dataloader_shuffle", "data.shuffle"),
    *part_of("data.prompt_key", "prompt_key"),
    *part_of("data.label_key", "response_key", "label_key"),
    *part_of("rollout.max_model_len", "max_length", "max_seq_len"),
    *idle("a pass has whole batches", "dataloader_drop_last", "dataloader_num_workers"),
    *idle("evaluation only", "max_evaluate_steps", "per_device_eval_batch_size", "eval_mode", "evaluation_strategy", "do_eval",
          "do_train", "early_stopping_threshold"),
    *idle("prompts have one limit", "max_src_len"),
)  # fmt: skip

RUN = (
    Rule("rollout_max_num_seqs", "rollout.max_num_seqs"),
    Rule("rollout_tensor_parallel_degree", "rollout.tensor_parallel", "-1: tensor_parallel_degree",
         lambda value, values: value if value > 0 else max(1, values.get("tensor_parallel_degree", 1))),
    Rule("tensor_parallel_degree", "trainer.parallel.tensor", "-1: 1", lambda value, _: max(1, value)),
    Rule("pipeline_parallel_degree", "trainer.parallel.pipeline", "-1: 1; every stage has equally many layers",
         lambda value, _: max(1, value)),
    Rule("sep_parallel_degree", "trainer.parallel.context", "-1: 1", lambda value, _: max(1, value)),
    Rule("virtual_pp_degree", "trainer.parallel.virtual_pipeline"),
    *part_of("trainer.parallel.data", "sharding_parallel_degree"),
    Rule("offload_optim", "trainer.offload.optimizer"),
    Rule("offload_level", "trainer.offload", "optimizer, or the models that do not compute", _offload),
    Rule("recompute", "trainer.recompute", "with recompute_granularity; full_attn and core_attn: selective", _recompute),
    Rule("save_steps", "trainer.save_interval", "optimizer steps / steps per iteration", interval),
    Rule("save_total_limit", "trainer.keep_checkpoints", "", lambda value, _: value or Off("all are kept")),
    Rule("eval_steps", "eval_interval", "optimizer steps / steps per iteration", interval),
    Rule("early_stopping", "eval_stop_after", "early_stopping_patience",
         lambda value, values: values.get("early_stopping_patience", 4) if value else Off()),
    *part_of("eval_stop_after", "early_stopping_patience"),
    Rule("output_dir", "output_dir", "", path),
    Rule("run_name", "name", "lower-case letters, digits and hyphens", name),
    Rule("report_to", "trackers", "metrics.jsonl and TensorBoard are always written", trackers),
    *idle("Paddle's kernels, memory, storage and logs", "pipeline_parallel_config", "sharding", "sharding_parallel_config",
          "recompute_*", "critic_recompute", "critic_recompute_*", "use_fused_*", "use_flash_attention", "use_remove_padding",
          "use_fusemt", "use_fp32_compute", "use_attn_mask_startend_row_indices", "fused_linear", "fp16_opt_level", "amp_*",
          "sequence_parallel", "tensor_parallel_output", "tensor_parallel_config", "balance_batch", "release_grads",
          "per_device_*_batch_size", "rollout_logprob_batch_size", "unified_checkpoint", "unified_checkpoint_config",
          "ignore_save_lr_and_optim", "save_strategy", "save_on_each_node", "overwrite_output_dir", "logging_dir",
          "logging_steps", "logging_strategy", "disable_tqdm", "wandb_*", "skip_profile_timer", "autotuner_benchmark", "stage",
          "device", "ignore_data_skip", "hybrid_parallel_topo_order", "do_predict", "do_export", "load_best_model_at_end"),
    *idle("groups are filtered without a limit of batches", "max_gen_batches", "global_gen_batch_size"),
)  # fmt: skip

RULES = (*TRAINING, *DATA, *RUN)
