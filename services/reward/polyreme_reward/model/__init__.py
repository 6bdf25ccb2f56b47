"""Reward models. `reward` runs in the service. `worker`, `classifier` and `device` run in the model's process; only they import torch."""
