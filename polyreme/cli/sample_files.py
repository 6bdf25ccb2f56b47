"""Streams the samples of a run directory, for exports of many samples. `reader` has an index, for queries that look at few of them.

Invariant: memory does not grow with the number of samples, and nothing is written. An iteration's file is complete or not there yet, so no
half sample is read.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from polyreme.cli.reader import Sample, SampleQuery
from polyreme.errors import ConfigError

_NAMES = {"train": "iteration", "eval": "evaluation"}

Range = tuple[float | None, float | None]
"""Both ends are included; None: no bound."""
EVERYTHING: Range = (None, None)


def read_samples(run_dir: Path, wanted: SampleQuery) -> Iterator[Sample]:
    """Yields the lines of the sample files that match, by iteration, in the order of their file.

    Args:
        run_dir: the run directory.
        wanted: which samples; `kind` is "train" or "eval". Its `order` and `prompt`, which need an index, do not count.

    Raises:
        ConfigError: a line is damaged.
    """
    for number, path in sample_files(run_dir, wanted.kind):
        if not _within(number, wanted.first, wanted.last):
            continue
        with open(path) as file:
            for place, line in enumerate(file, start=1):
                try:
                    sample = json.loads(line)
                    if matches(sample, wanted):
                        yield sample
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(f"a sample in line {place} of {path}", repr(error), "Restore or remove the file.") from None


def matches(sample: Sample, wanted: SampleQuery) -> bool:
    """Whether a line of a sample file matches. Its iteration is not looked at, since whole files are chosen by it."""
    texts = (str(sample[name]).lower() for name in ("prompt", "label", "response"))
    return (
        _within(sample["score"], wanted.score_min, wanted.score_max)
        and _within(sample["tokens"], wanted.tokens_min, wanted.tokens_max)
        and wanted.finish in ("", sample["finish_reason"])
        and any(wanted.text.lower() in text for text in texts)
    )


def sample_files(run_dir: Path, kind: str = "train") -> list[tuple[int, Path]]:
    """The sample files of a run directory with their iteration ("eval": version), ascending."""
    name = _NAMES[kind]
    numbered = ((path.stem.removeprefix(f"{name}_"), path) for path in (run_dir / "samples").glob(f"{name}_*.jsonl"))
    return sorted((int(number), path) for number, path in numbered if number.isdigit())


def parse_range(text: str) -> Range:
    """A range from "5", "3:10", "3:" or ":10". Raises ValueError."""
    low, colon, high = text.partition(":")
    if not colon:
        return float(low), float(low)
    return (float(low) if low else None), (float(high) if high else None)


def sample_filter(kind: str, iterations: Range, score: Range, tokens: Range, text: str) -> SampleQuery:
    """A filter from ranges."""

    def whole(bound: float | None) -> int | None:
        return None if bound is None else int(bound)

    return SampleQuery(
        kind=kind,
        first=whole(iterations[0]),
        last=whole(iterations[1]),
        score_min=score[0],
        score_max=score[1],
        tokens_min=whole(tokens[0]),
        tokens_max=whole(tokens[1]),
        text=text,
    )


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)
