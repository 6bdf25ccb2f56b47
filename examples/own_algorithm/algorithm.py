"""A custom algorithm: the group's median as baseline, and a policy gradient with truncated importance weights.

An outlier shifts the mean of a group, but hardly its median. The ratio to the policy before the step is a weight without gradient, capped
at CAP, so every token keeps its gradient.
"""

import numpy as np
import torch

CAP = 2.0


def advantages(batch):
    """Returns score minus the median of the group: float64 [t], one number per predicted token of the batch.

    `batch` is a `polyreme_trainer.algorithms.batch.TokenBatch`: numpy arrays of a whole iteration, [n] per sequence and [t] per token.
    """
    median = np.zeros(len(batch))
    for group in np.unique(batch.group):
        members = batch.group == group
        median[members] = np.median(batch.score[members])
    return (batch.score - median)[batch.sequence_of]


def loss(inputs):
    """Returns the loss `-min(r, CAP) A log p`, and metrics as name -> (sum, weight).

    `inputs` is a `polyreme_trainer.algorithms.inputs.LossInputs`: torch tensors [t] of the trained tokens of one micro-batch. A loss is a
    sum over tokens weighted with `inputs.weight`, so that the losses of micro-batches and ranks add up to the loss of the whole step.
    """
    ratio = torch.exp(inputs.logprobs.detach() - inputs.old)
    token_loss = -ratio.clamp(max=CAP) * inputs.advantages * inputs.logprobs
    metrics = {"own/capped_fraction": ((ratio > CAP).float().sum(), torch.tensor(float(len(ratio))))}
    return (inputs.weight * token_loss).sum(), metrics
