"""A tiny policy for any environment: its words are those of the conversations that it starts from."""

import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from string import printable
from typing import Any

import yaml

from support import guide

CALL = ['<tool_call>\n{"name": "', '", "arguments": {', "}}\n</tool_call>"]
CONTEXT = 4096
"""Tokens. Positions are rotary, so none of the weights depend on it."""


def write_run(
    folder: Path, block: str, rows: list[dict[str, Any]], steps: int, whole: Collection[str] = (), **sections: Any
) -> Path:
    """Writes a policy, its warm start and run.yaml, whose sections are those of a block of the page about packages, and a small run's.

    Args:
        folder: gets the files.
        block: the block's name.
        rows: conversations of the warm start, which repeats them; none: no policy yet.
        steps: of the warm start.
        whole: texts that are one token each.
        sections: over those of the block, key by key.

    Returns the configuration's path.
    """
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _save_policy(folder / "model", rows, whole)
    guide.write_files("environment-packages.md", folder)
    warm = {"data": "sft.jsonl", "steps": steps, "batch_size": 32, "lr": 2e-3, "warmup": 10, "cooldown": steps // 2}
    tree: dict[str, Any] = {
        "output_dir": "runs",
        "iterations": 50,
        "groups_per_iteration": 2,
        "group_size": 8,
        "model": {"path": "model"},
        "data": {"max_prompt_tokens": 512},
        "rollout": {"engine": "transformers", "max_new_tokens": 12, "max_model_len": 2048},
        "algorithm": {"preset": "grpo", "kl": None, "aggregation": "token-mean"},
        "trainer": {"micro_batch_tokens": 8192, "optimizer": {"lr": 5e-4, "warmup": 2}, "sft": [warm] if rows else []},
    }
    for over in (yaml.safe_load((folder / block).read_text()), sections):
        for key, value in over.items():
            tree[key] = {**(tree.get(key) or {}), **value} if isinstance(value, dict) else value
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _save_policy(folder: Path, rows: list[dict[str, Any]], whole: Collection[str]) -> None:
    sys.path.insert(0, str(guide.ROOT / "examples"))
    try:
        import tiny_chat  # type: ignore[import-not-found]  # of a folder that is no package
    finally:
        sys.path.pop(0)
    texts = {message["content"] for row in rows for message in row["messages"]}
    texts |= {json.dumps(call) for row in rows for message in row["messages"] for call in message.get("tool_calls", ())}
    words = {word for text in texts for word in re.findall(r" ?\w+", text)}
    tiny_chat.save(folder, list(dict.fromkeys([*tiny_chat.ROLES, *CALL, *whole, *sorted(words), *printable])), 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
