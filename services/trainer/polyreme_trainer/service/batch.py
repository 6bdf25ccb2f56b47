"""A batch of the training service."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """Sequences whose targets need not be their own next tokens.

    Attributes:
        inputs: int64 [n] each, the model's inputs.
        targets: int64 [n] each, the token to predict at each position.
        columns: name -> float32 [t], an input of the loss for every position of all sequences, one after the other.
    """

    inputs: Sequence[NDArray[np.int64]]
    targets: Sequence[NDArray[np.int64]]
    columns: Mapping[str, FloatArray]
