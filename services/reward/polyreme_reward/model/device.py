"""The devices cpu, cuda and npu.

Invariant: no other module of the reward service depends on the device of a model.
"""

import torch

from polyreme.errors import ConfigError


def open_device(name: str, threads: int) -> torch.device:
    """Prepares a device for this process.

    Args:
        name: cpu, cuda or npu; cuda and npu may have a number, as in cuda:1.
        threads: compute threads on CPU.

    Raises:
        ConfigError: this machine does not have the device.
    """
    torch.set_num_threads(threads)
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "npu":
        try:
            import torch_npu  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as error:
            raise ConfigError("torch_npu for device: npu", str(error), "Use the npu image, or set another device.") from None
    module = getattr(torch, kind)
    count = module.device_count() if module.is_available() else 0
    if int(number or 0) >= count:
        raise ConfigError(
            f"a machine with {name}",
            f"torch {torch.__version__} with {count} {kind} devices",
            "Set options.device to cpu or to another device.",
        )
    device = torch.device(kind, int(number or 0))
    module.set_device(device)
    return device
