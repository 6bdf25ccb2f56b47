"""`polyreme samples`: the samples that a run was trained on, filtered.

Invariant: with --json the output is the sample files' own lines, one JSON object each, so that another program can read them.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from polyreme.display.report import shortened
from polyreme.errors import ConfigError
from polyreme.rundir.reader import EVERYTHING, Range, RunReader, Sample, parse_range, sample_query
from polyreme.rundir.service_status import SERVICE
from polyreme.terminal.terminal import TerminalConsole

_RANGE = "one number, or a range such as 3:10, 3: or :10"
_SHOWN = 20


def samples(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.")],
    iteration: Annotated[str | None, typer.Option(help=f"Iterations: `newest`, {_RANGE}. Default: newest.")] = None,
    reward: Annotated[str | None, typer.Option(help=f"Total reward: {_RANGE}.")] = None,
    tokens: Annotated[str | None, typer.Option(help=f"Response length in tokens: {_RANGE}.")] = None,
    text: Annotated[str, typer.Option(help="Part of the prompt, the label or the response, in any case.")] = "",
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Show the answers of evaluations; --iteration then selects policy versions.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Maximum number of samples. Default: {_SHOWN}, with --json all of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
) -> None:
    """Show samples of a run, filtered by iteration, reward, length and text."""
    reader, kind = RunReader(run_dir), "eval" if evaluation else "train"
    if reader.config().get("stage", SERVICE) != SERVICE:
        raise ConfigError(f"a run with samples at {run_dir}", "a stage, which generates none", "Pass the directory of a run.")
    scores, lengths = _range("--reward", reward), _range("--tokens", tokens, whole=True)
    chosen = _range("--iteration", None if iteration == "newest" else iteration, whole=True)
    reader.catch_up()
    if iteration in (None, "newest"):
        newest = reader.newest_step(kind)
        chosen = (newest, newest)
    query = sample_query(kind, chosen, scores, lengths, text, "oldest" if as_json else "prompts")
    most = limit or (None if as_json else _SHOWN)
    console, shown = TerminalConsole(sys.stdout), 0
    for sample in itertools.islice(reader.read_samples(query), most):
        shown += 1
        console.print(json.dumps(sample) if as_json else "\n".join(sample_text(sample)), soft_wrap=True)
        if console.quiet:  # the reader of the output has gone
            return
    if as_json:
        return
    total, _ = reader.find_samples(query, limit=0)
    if not total:
        console.print("no samples match", soft_wrap=True)
    elif shown < total:
        text = (
            f"{shown} of {total} samples: one of each prompt, then a second one; --limit {total} shows all, --text PROMPT those"
            " of a prompt"
        )
        console.print(text, soft_wrap=True)


def sample_text(sample: Sample) -> list[str]:
    """A sample as a few lines of text: origin, score, prompt, response and label, each on one line."""
    place = f"iteration {sample['iteration']}, group {sample['group']}" if "group" in sample else f"version {sample['version']}"
    parts = ", ".join(f"{name} {part['raw']:g}" for name, part in sample["parts"].items())
    score = "-" if sample["score"] is None else f"{sample['score']:g}" + (f" ({parts})" if len(sample["parts"]) > 1 else "")
    head = f"{place}: reward {score}, {sample['tokens']} tokens, {sample.get('outcome', sample['finish_reason'])}"
    messages = sample.get("messages")
    texts = {name: _shown(sample[name]) for name in (["label"] if messages else ["prompt", "response", "label"])}
    return [head, *(conversation_text(sample) if messages else ()), *(f"  {name:9} {text}" for name, text in texts.items())]


def conversation_text(sample: Sample) -> list[str]:
    """The messages of an episode, each on one line; below a turn of the sample's trajectory its reward and its tool calls."""
    lines = list[str]()
    for message in sample["messages"]:
        note = " (withdrawn)" if message.get("withdrawn") else ""
        lines.append(f"  {message['role']:9} {_shown(message.get('content') or '')}{note}")
        if message.get("trajectory") == sample.get("trajectory", 0):
            turn = sample["turns"][message["turn"]]
            lines += [
                f"    {call['name']}({_shown(call['arguments'])}): {_shown(call['error'] or call['result'])}"
                for call in turn["tool_calls"]
            ]
            lines += [f"    reward {turn['reward']:g}"] if turn["reward"] else []
    return lines


def _shown(value: object) -> str:
    return shortened(str(value), 1000)


def _range(option: str, text: str | None, *, whole: bool = False) -> Range:
    if text is None:
        return EVERYTHING
    try:
        bounds = parse_range(text)
        if whole and any(bound is not None and bound % 1 for bound in bounds):
            raise ValueError(text)
    except ValueError:
        numbers = ", of whole numbers" if whole else ""
        raise ConfigError(f"{option} as {_RANGE}{numbers}", repr(text), "Fix the option.") from None
    return bounds
