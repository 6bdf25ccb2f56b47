"""Reward models. `reward` runs in the service; only `worker`, `classifier` and `device`, in the model's process, import torch."""
