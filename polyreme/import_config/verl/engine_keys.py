"""The fate of the keys of verl's engines (Megatron, torchtitan, VeOmni), and the layout that they give the learner's ranks.

FSDP's keys are among those of the actor. Names: verl/trainer/config/engine/*.yaml.

Invariant: a pattern with `*` says "no effect on training" only where that is true of every key below it.
"""

from polyreme.import_config.convert import above, given, lookup, product
from polyreme.import_config.rules import Rule, Values, idle, lost, part_of
from polyreme.import_config.verl.algorithm import ACTOR

MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
SIZES = {
    "megatron": {
        "tensor": "tensor_model_parallel_size",
        "pipeline": "pipeline_model_parallel_size",
        "context": "context_parallel_size",
    },
    "torchtitan": {"tensor": "tensor_parallel_size", "pipeline": "pipeline_parallel_size", "context": "context_parallel_size"},
    "veomni": {"context": "ulysses_parallel_size"},
}
"""Below the engine's section, the name of each dimension of the layout."""


def engine_of(values: Values) -> str:
    """megatron, torchtitan, veomni or fsdp, as the actor's strategy, the name of the configuration or the keys say."""
    named = [str(values.get(key, "")) for key in (f"{ACTOR}.strategy", "model_engine", "config-name")]
    for engine in SIZES:
        if any(engine in name for name in named) or any(f"{ACTOR}.{engine}.{size}" in values for size in SIZES[engine].values()):
            return engine
    return "fsdp"


def sizes_of(values: Values) -> tuple[dict[str, int], str]:
    """Ranks of the dimensions tensor, pipeline and context, and where they come from."""
    engine = engine_of(values)
    if engine == "fsdp":
        sequence = product(values.get(f"{ACTOR}.ulysses_sequence_parallel_size"))
        return {"tensor": 1, "pipeline": 1, "context": sequence}, "FSDP's ranks are data ranks, Ulysses' are context ranks"
    names = SIZES[engine]
    found = {
        ours: product(values.get(f"{ACTOR}.{engine}.{names[ours]}") if ours in names else 1)
        for ours in ("tensor", "pipeline", "context")
    }
    return found, f"{engine}.*_parallel_size"


MEGATRONS = (
    *part_of("trainer.parallel", *(f"{MEGATRON}.{each}_parallel_size" for each in ("tensor_model", "pipeline_model", "context"))),
    Rule(f"{MEGATRON}.virtual_pipeline_model_parallel_size", "trainer.parallel.virtual_pipeline", "", given),
    Rule(f"{MEGATRON}.expert_model_parallel_size", "trainer.parallel.expert", "1: experts are not divided", above(1)),
    Rule(f"{MEGATRON}.expert_tensor_parallel_size", "trainer.parallel.expert_tensor", "", given),
    Rule(f"{MEGATRON}.optimizer_offload", "trainer.offload.optimizer"),
    Rule(f"{MEGATRON}.param_offload", "trainer.offload.idle_models", "models that do not compute are on the host"),
    Rule(f"{TRANSFORMER}.recompute_granularity", "trainer.recompute", "",
         lookup({"full": "full", "selective": "selective"}, None)),
    Rule(f"{TRANSFORMER}.moe_aux_loss_coeff", "trainer.moe.aux_loss_coef", "0: none", above(0)),
    Rule(f"{TRANSFORMER}.moe_z_loss_coeff", "trainer.moe.z_loss_coef", "0: none", above(0)),
    Rule(f"{TRANSFORMER}.moe_router_bias_update_rate", "trainer.moe.bias_update_rate", "0: none", above(0)),
    Rule(f"{MEGATRON}.router_replay.mode", "trainer.moe.replay_routes", "R3: the replica's choice",
         lookup({"R3": True}, "disabled", None)),
    *lost("no training with simulated quantization", f"{MEGATRON}.qat.enable", unless=(None, False)),
    *idle("only used with qat.enable", f"{MEGATRON}.qat.*"),
    *lost("there is no dropout", f"{TRANSFORMER}.attention_dropout", f"{TRANSFORMER}.hidden_dropout", unless=(None, 0)),
    *idle("kernels, memory and schedules of Megatron", *(f"{TRANSFORMER}.{each}" for each in (
        "recompute_*", "attention_backend", "apply_rope_fusion", "*_fusion", "gradient_accumulation_fusion",
        "deallocate_pipeline_outputs", "persist_layer_norm", "moe_grouped_gemm", "moe_permute_fusion",
        "moe_token_dispatcher_type", "moe_enable_deepep", "moe_shared_expert_overlap", "moe_router_dtype", "account_for_*",
        "num_layers_in_*", "masked_softmax_fusion", "overlap_*", "use_flash_attn", "fine_grained_activation_offloading",
        "offload_modules"))),
    *idle("memory, storage and schedules of Megatron", *(f"{MEGATRON}.{each}" for each in (
        "grad_offload", "sequence_parallel", "use_distributed_optimizer", "use_dist_checkpointing", "dist_checkpointing_*",
        "seed", "override_ddp_config.*", "use_mbridge", "vanilla_mbridge", "use_megatron_fsdp", "use_remove_padding",
        "forward_only", "dynamic_context_parallel", "max_seqlen_per_dp_cp_rank", "dist_ckpt_optim_fully_reshardable", "pad_*",
        "entropy_from_logits_*", "distrib_optim_fully_reshardable_mem_efficient", "router_replay.record_file",
        "router_replay.replay_file"))),
)  # fmt: skip

TORCHTITANS = (
    *part_of("trainer.parallel", *(f"{ACTOR}.torchtitan.{each}" for each in (*SIZES["torchtitan"].values(), "data_parallel_size",
             "data_parallel_replicate_size", "data_parallel_shard_size"))),
    *idle("how the ranks share memory and compute", *(f"{ACTOR}.torchtitan.{each}" for each in (
        "wrap_policy.*", "reshard_after_forward", "forward_prefetch", "use_orig_params", "use_torch_compile", "entropy_*",
        "attn_type", "spmd_backend", "activation_checkpoint", "max_seq_len", "strategy", "seed", "full_determinism",
        "forward_only", "mixed_precision"))),
)  # fmt: skip

VEOMNIS = (
    *part_of("trainer.parallel", f"{ACTOR}.veomni.ulysses_parallel_size"),
    Rule(f"{ACTOR}.veomni.router_replay.mode", "trainer.moe.replay_routes", "R3: the replica's choice",
         lookup({"R3": True}, "disabled", None)),
    *lost("no training with simulated quantization", f"{ACTOR}.veomni.qat_implementation", unless=(None, "none")),
    *lost("a run starts from the weights of model.path", f"{ACTOR}.veomni.load_checkpoint_path", unless=(None, "")),
    *lost("the learner computes in bfloat16", f"{ACTOR}.veomni.mixed_precision", unless=(None, True)),
    *idle("how the ranks share memory and compute", *(f"{ACTOR}.veomni.{each}" for each in (
        "fsdp_size", "seed", "full_determinism", "init_device", "enable_full_shard", "ckpt_manager", "forward_prefetch",
        "strategy", "use_torch_compile", "entropy_*", "forward_only", "enable_fsdp_offload", "enable_reentrant",
        "*_implementation", "force_use_huggingface", "enable_async_activation_offload", "activation_offload_*", "basic_modules",
        "pad_to_length*", "router_replay.record_file", "router_replay.replay_file"))),
)  # fmt: skip

SHARED = tuple(
    rule
    for engine in ("torchtitan", "veomni")
    for rule in (
        Rule(f"{ACTOR}.{engine}.expert_parallel_size", "trainer.parallel.expert", "1: experts are not divided", above(1)),
        Rule(f"{ACTOR}.{engine}.optimizer_offload", "trainer.offload.optimizer"),
        Rule(f"{ACTOR}.{engine}.param_offload", "trainer.offload.idle_models", "models that do not compute are on the host"),
        *lost("the learner computes in bfloat16", f"{ACTOR}.{engine}.dtype", unless=(None, "bfloat16", "bf16")),
        *idle("roles share the learner's ranks", f"critic.{engine}.*", f"actor_rollout_ref.ref.{engine}.*"),
    )
)

ENGINES = (*MEGATRONS, *TORCHTITANS, *VEOMNIS, *SHARED)
