"""The training samples in a run directory, read one at a time.

Invariant: memory does not grow with the number of samples. An iteration's file is complete or not there yet, so no half sample is read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError

Sample = dict[str, Any]
Range = tuple[float, float]
EVERYTHING: Range = (float("-inf"), float("inf"))


@dataclass(frozen=True)
class SampleFilter:
    """Which samples to read. Ranges include both ends.

    Attributes:
        iterations: range of iterations; of evaluations: of versions.
        score: range of the total reward.
        tokens: range of the response's length in tokens.
        prompt, response: text that the prompt, or the response, must contain.
    """

    iterations: Range = EVERYTHING
    score: Range = EVERYTHING
    tokens: Range = EVERYTHING
    prompt: str = ""
    response: str = ""

    def accepts(self, sample: Sample) -> bool:
        """Whether a sample matches. Its iteration is not looked at, since whole files are chosen by it."""
        return (
            self.score[0] <= sample["score"] <= self.score[1]
            and self.tokens[0] <= sample["tokens"] <= self.tokens[1]
            and self.prompt in str(sample["prompt"])
            and self.response in str(sample["response"])
        )


def read_samples(run_dir: Path, chosen: SampleFilter = SampleFilter(), kind: str = "iteration") -> Iterator[Sample]:
    """Yields the samples that match, by iteration, in the order of their file.

    Args:
        run_dir: the run directory.
        chosen: which samples.
        kind: "iteration" for training samples, "evaluation" for the answers of evaluations.

    Raises:
        ConfigError: a line is damaged.
    """
    for number, path in sample_files(run_dir, kind):
        if not chosen.iterations[0] <= number <= chosen.iterations[1]:
            continue
        with open(path) as file:
            for place, line in enumerate(file, start=1):
                try:
                    sample = json.loads(line)
                    if chosen.accepts(sample):
                        yield sample
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"a sample in line {place} of {path}", repr(error), "Restore or remove the file.") from None


def sample_files(run_dir: Path, kind: str = "iteration") -> list[tuple[int, Path]]:
    """The sample files of a run directory with their iteration (of evaluations: version), ascending."""
    numbered = ((path.stem.removeprefix(f"{kind}_"), path) for path in (run_dir / "samples").glob(f"{kind}_*.jsonl"))
    return sorted((int(number), path) for number, path in numbered if number.isdigit())


def parse_range(text: str) -> Range:
    """A range from "5", "3:10", "3:" or ":10". Raises ValueError."""
    low, colon, high = text.partition(":")
    if not colon:
        return float(low), float(low)
    return (float(low) if low else EVERYTHING[0]), (float(high) if high else EVERYTHING[1])
