"""The text of a turn while it is sampled.

Invariant: the texts that are told follow each other, and together they are the beginning of the turn's text.
"""

from collections.abc import Callable

import numpy as np

from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollouts

_OPEN_THOUGHT = "<think>"
_OPENING_TOKENS = 8


class TurnText:
    """Tells the text of the only sample of its rollouts, without special tokens, as tokens come."""

    def __init__(self, template: Template, tell: Callable[[str], None]) -> None:
        self._step, self._tell = template.text_stream(special=False), tell
        self._tokens, self._cuts, self._told = 0, 0, ""

    def __call__(self, rollouts: PartialRollouts) -> None:
        """Takes what has arrived. Raises GenerateError when tokens were dropped whose text has been told."""
        if rollouts.cuts > self._cuts and self._tokens:
            raise GenerateError(
                "expected the tokens of a streamed turn to stay; found them dropped, since a resumed learner is behind them"
            )
        self._cuts = rollouts.cuts
        ids = rollouts.samples[0].token_ids()
        text = "".join(self._step(id) for id in ids[self._tokens :].tolist())
        self._tokens = len(ids)
        if text:
            self._told += text
            self._tell(text)

    def check(self, text: str) -> None:
        """Raises GenerateError unless what was told is the beginning of the turn's text, after any stop has ended that."""
        if not text.startswith(self._told) and not self._told.startswith(text):
            raise GenerateError(f"expected a turn that begins with the text told of it, {self._told!r:.200}; found {text!r:.200}")


def opens_thought(template: Template, context: np.ndarray) -> bool:
    """Whether a context ends within a thought that the answer goes on with, as some models' chat templates have it. int32 [c]."""
    (end,) = template.decode([context[-_OPENING_TOKENS:].tolist()], special=True)
    return end.rstrip().endswith(_OPEN_THOUGHT)
