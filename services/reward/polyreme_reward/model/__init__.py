"""Reward models: `reward` asks, in the service; `worker`, `classifier` and `device` run in a process of the model's own, and they alone
import torch."""
