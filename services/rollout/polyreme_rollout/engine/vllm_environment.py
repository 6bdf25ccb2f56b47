"""The environment variables of the vLLM engine.

Invariant: pure. Of the variables that decide how vLLM and torch's process groups start, the engine gets those of Polyreme and
those that the user names in PASSED, and no other: Kubernetes, for example, sets VLLM_PORT=tcp://... in every pod beside a service
called `vllm`. Variables under which vLLM's sleep would fail, or damage weights, are refused by their names.
"""

from collections.abc import Mapping

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError
from polyreme.process.machine import thread_environment

PASSED = "POLYREME_ENGINE_ENV"
"""Names of variables, separated by commas, that the user passes to the engine on purpose. Those of Polyreme take precedence."""
_FOREIGN_PREFIXES = ("VLLM_", "RAY_", "TORCHELASTIC_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
_FOREIGN = frozenset(
    ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HOST_IP")
)
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that configure torch's allocator."""


def foreign(environ: Mapping[str, str]) -> list[str]:
    """The names, sorted, of variables that must not reach the engine."""
    passed = {name.strip() for name in environ.get(PASSED, "").split(",")}
    return sorted(name for name in environ if (name.startswith(_FOREIGN_PREFIXES) or name in _FOREIGN) and name not in passed)


def engine_environment(config: RunConfig, environ: Mapping[str, str], loopback: str, interface: str) -> dict[str, str]:
    """The environment of the engine and of the processes that it forks.

    Args:
        environ: that of the service.
        loopback, interface: this machine's loopback address and its interface. The engine's processes meet there.
    """
    unwanted = set(foreign(environ))
    kept = {name: value for name, value in environ.items() if name not in unwanted}
    quiet = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # vLLM's warnings are about settings that are intended here
    ours = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # PolicyWorker reads token counts of the first model runner
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": loopback,
        "VLLM_LOOPBACK_IP": loopback,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device == "cpu":
        ours |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes of the run share these cores
            **thread_environment(config.rollout.vllm.threads),
            "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler for each new batch size would stop generation for seconds
        }
    if config.device == "npu":
        ours["VLLM_ASCEND_ENABLE_NZ"] = "0"  # a reload, and a wake of weights alone, need the plain format
    return {**quiet, **kept, **ours}


def check_sleep(environment: Mapping[str, str]) -> None:
    """Raises ConfigError when an engine of a colocated run could not sleep and wake under these variables."""
    for name in ALLOCATORS:
        if "expandable_segments:true" in (text := environment.get(name, "")).lower().replace(" ", ""):
            raise ConfigError(
                f"{name} without expandable segments, whose memory a sleeping engine cannot release",
                f"{name}={text}",
                f"Remove expandable_segments from {name} of the replicas, or set placement: separate.",
            )
