"""Every block of a page is executed by a test, compared with the code, or preceded by the reason why not.

Invariant: blocks that are not executed are still checked: YAML by the configuration's schema, JSON by a parser, commands by the command
line.
"""

import ast
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.load import parse, parse_config, resolve_paths
from polyreme.config.run import RunConfig
from polyreme.config.stage import STAGES
from polyreme.import_config.systems import SYSTEMS
from support import command_lines
from support.guide import ROOT, Block, blocks

EXECUTED = {
    "docs/agents.md": "tests/integration/test_agents.py",
    "docs/data.md": "tests/unit/docs/test_data_guide.py",
    "docs/design.md": "tests/integration/test_rl_loop.py",
    "docs/environment-packages.md": "tests/integration/test_openenv.py",
    "docs/environments.md": "tests/integration/test_environment_server.py",
    **dict.fromkeys((f"docs/from-{name}.md" for name in SYSTEMS), "tests/unit/docs/test_coming_from.py"),
    "docs/tutorial.md": "tests/e2e/test_tutorial.py",
    "docs/gsm8k.md": "tests/integration/test_gsm8k_page.py",
    "docs/import.md": "tests/unit/import_config/test_systems.py",
    "docs/evaluation.md": "tests/integration/gateway/test_lm_eval.py",
    "docs/notebook.md": "tests/unit/docs/test_notebook.py",
    "docs/one-iteration.md": "tests/unit/docs/test_one_iteration.py",
    "docs/online.md": "tests/integration/test_online.py",
    "docs/rewards.md": "tests/integration/test_reward_docs.py",
    "docs/stages.md": "tests/e2e/test_stages.py",
    "docs/v1.md": "tests/e2e/test_tutorial.py",
}
"""The pages whose `file=` and `run` blocks a test writes and runs."""

TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCKS = [block for page in PAGES for block in blocks(page)]
LANGUAGES = {"sh", "console", "python", "yaml", "json", "jsonl", "js", "ini", "text"}

BASE: dict[str, Any] = {
    "iterations": 10,
    "groups_per_iteration": 4,
    "group_size": 8,
    "model": {"path": "model"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 32},
    "rollout": {"max_new_tokens": 32, "max_model_len": 256},
    "reward": {"rewards": [{"name": "exact"}]},
    "algorithm": {"preset": "grpo"},
    "trainer": {"optimizer": {"lr": 1e-6}},
}
"""Values for the keys that partial configurations on the pages omit."""


def ids(block: Block) -> str:
    return str(block)


@pytest.mark.parametrize("block", BLOCKS, ids=ids)
def test_a_block_is_executed_or_compared_with_the_code(block: Block) -> None:
    assert block.language in LANGUAGES, "name the block's language: `text` for what is neither code nor configuration"
    if block.file or block.info:
        assert block.page in EXECUTED, "name the test that writes and runs the page's files and commands in EXECUTED"
    match block.language:
        case "yaml":
            check_yaml(block)
        case "json" | "jsonl":
            check_json(block)
        case "sh" | "console" if not (block.file and block.reason):
            check_commands(block)
        case "python":
            ast.parse(block.text)
            assert block.page in EXECUTED or block.reason, "let a test execute it, or write why not above it"
        case "js":
            assert block.page in EXECUTED or block.reason
        case "ini":
            check_variables(block)


@pytest.mark.parametrize(("page", "test"), EXECUTED.items())
def test_the_test_of_a_page_reads_it(page: str, test: str) -> None:
    name = "from-" if "from-" in page else Path(page).name
    assert name in (ROOT / test).read_text()


def check_yaml(block: Block) -> None:
    """Checks the YAML of a run, a stage, or a part of a run."""
    tree = yaml.safe_load(block.text)
    if block.reason:
        return
    resolve_paths(tree, STAGES[tree["stage"]] if "stage" in tree else RunConfig, (ROOT / block.page).parent)
    if "stage" in tree:
        parse(tree, str(block), STAGES[tree["stage"]])
    else:
        parse_config(merged(BASE, tree), str(block))


def merged(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` over `base`, sections key by key."""
    whole = {**base, **tree}
    for key in base.keys() & tree.keys():
        if isinstance(base[key], dict) and isinstance(tree[key], dict):
            whole[key] = merged(base[key], tree[key])
    return whole


def check_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


def check_commands(block: Block) -> None:
    script = block.text
    if block.language == "console":
        script = "\n".join(line.removeprefix("$ ") for line in script.splitlines() if line.startswith("$ "))
    own = [other.file for other in BLOCKS if other.file]
    for words in command_lines.simple_commands(script):
        if words[0] in {"polyreme", "make"} or not (block.reason or block.info in {"run", "check"}):
            assert command_lines.problems(words, own) == [], " ".join(words)


def check_variables(block: Block) -> None:
    """Checks settings of the compose file, which .env.example describes."""
    known = (ROOT / ".env.example").read_text()
    for line in block.text.splitlines():
        assert f"{line.partition('=')[0]}=" in known, line


INLINE = re.compile(r"`(polyreme [^`\n]+)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_in_a_sentence_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    check = partial(command_lines.problems, files=())
    found = {line: check(words) for line in INLINE.findall(text) for words in command_lines.simple_commands(line)}
    assert {line: wrong for line, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("polyreme up run.yaml iterations=3 --resume", 0),
        ("polyreme up run.yaml iteration=3", 1),
        ("polyreme up run.yaml --resum", 1),
        ("polyreme upp run.yaml", 1),
        ("polyreme config chek run.yaml", 1),
        ("polyreme doctor --device gpu", 1),
        ("make demo && make dmo", 1),
        ("polyreme rollout --redis URL | tee 2> log & polyreme audit --all", 2),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, wrong: int) -> None:
    found = [problem for words in command_lines.simple_commands(line) for problem in command_lines.problems(words)]
    assert len(found) == wrong, found


def test_the_schema_is_the_one_of_a_run() -> None:
    assert isinstance(parse_config(BASE, "the base"), RunConfig)
