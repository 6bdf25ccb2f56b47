"""Finished episodes of unfinished groups, and whether a run kept them: each play of an episode has its own tokens and seconds."""

import json
import struct
from pathlib import Path

from polyreme.experience.log_reader import LogReader
from polyreme.experience.record_codec import decode_group
from polyreme.experience.run import Run

Key = tuple[int, int, int]
"""Group, attempt, and number of the episode."""
Finished = tuple[float, list[list[int]]]
"""Seconds in the environment, and the tokens of each trajectory."""


async def finished_episodes(run: Run) -> dict[Key, Finished]:
    """Those that the log has of the groups in flight."""
    log, found = LogReader(run), {}
    admissions = {admission.index: admission for admission in await log.in_flight()}
    for index, parts in (await log.partial_rollouts([*admissions.values()])).items():
        for part in parts:
            (count,) = struct.unpack_from("<I", part)
            group = decode_group(part[4 * (count + 1) :])
            for place, number in enumerate(struct.unpack_from(f"<{count}I", part, 4)):
                tokens = [sample.token_ids.tolist() for sample in group.samples if sample.episode == place]
                found[index, admissions[index].attempt, number] = round(group.episodes[place].seconds, 5), tokens
    return found


def trained_episodes(folder: Path) -> dict[Key, Finished]:
    """Those in a run's sample files."""
    found: dict[Key, Finished] = {}
    for path in sorted(folder.glob("iteration_*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            key = line["group"], line["attempt"], line["episode"]
            found.setdefault(key, (line["environment_seconds"], []))[1].append(line["token_ids"])
    return found


def replayed(finished: dict[Key, Finished], trained: dict[Key, Finished]) -> list[str]:
    """The problems of finished episodes in the log that an iteration trained otherwise. Must be empty."""
    both = finished.keys() & trained.keys()
    return [f"episode {key} was played again" for key in sorted(both) if finished[key] != trained[key]]
