"""Group-relative advantages: a sample is judged against the other samples of its prompt, so that no value model is needed."""

import numpy as np
from numpy.typing import NDArray

STD_FLOOR = 1e-4
"""Added to a group's standard deviation, so that near-equal scores are not blown up into full-size advantages."""


def group_advantages(scores: NDArray[np.float64], normalize_std: bool) -> NDArray[np.float32]:
    """Advantage of each sample within its group: `(r - mean) / (std + STD_FLOOR)`, or `r - mean`.

    With the division: GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2. Without: Dr. GRPO, Liu et al. 2025
    (arXiv 2503.20783), section 3.2. The deviation is the unbiased one (n - 1). A group whose scores are all equal gets
    advantages of exactly zero, so that callers may leave its samples out of the backward pass without changing the gradient.

    Args:
        scores: float64 [groups, samples], finite.
        normalize_std: whether to divide by the group's standard deviation.

    Returns:
        float32 [groups, samples].

    Raises:
        ValueError: fewer than two samples in a group, or a score that is not finite.
    """
    if scores.ndim != 2 or scores.shape[1] < 2:
        raise ValueError(f"scores of shape {scores.shape}: a group needs at least two samples")
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite")
    centred = scores - scores.mean(axis=1, keepdims=True)
    if normalize_std:
        centred = centred / (scores.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR)
    constant = scores.max(axis=1, keepdims=True) == scores.min(axis=1, keepdims=True)
    return np.where(constant, 0.0, centred).astype(np.float32)
