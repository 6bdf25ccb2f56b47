"""Keeps the service's secrets from workers, programs and other processes of the same user.

Invariant: the environment of the keeper and its workers has only the variables named here or in the configuration. So it contains
no password or token of the service.
"""

import ctypes
import os
import sys
from collections.abc import Collection, Mapping

_NAMES = frozenset(
    ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV", "SSL_CERT_FILE", "SSL_CERT_DIR",
     "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")
)  # fmt: skip
_PREFIXES = (
    "LC_",
    "LD_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "TORCH_",
    "CUDA_",
    "NVIDIA_",
    "ASCEND_",
    "NPU_",
    "HCCL_",
)
_PR_SET_DUMPABLE = 4


def scrubbed(environment: Mapping[str, str], keep: Collection[str]) -> dict[str, str]:
    """The environment of child processes: variables that Python, its libraries and devices need, and those named in `keep`."""
    return {name: value for name, value in environment.items() if name in _NAMES or name in keep or name.startswith(_PREFIXES)}


def refuse_inspection() -> None:
    """Prevents other processes of this user from reading this one's memory and environment or attaching to it. Forks inherit it.

    Does nothing on systems other than Linux. Raises OSError.
    """
    if sys.platform == "linux" and ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
