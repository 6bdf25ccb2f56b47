"""examples/rl_loop.py learns a task of its own, and docs/design.md shows its lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme.config.load import load_config
from support.service import service
from support.whole_run import make_task

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "rl_loop.py"
RUN = """
import json, sys
sys.path.insert(0, sys.argv[1])
import rl_loop
from pathlib import Path
from polyreme.config.load import load_config
settings = ("rollout.engine=transformers", "trainer.parallel={}", "iterations=6", "trainer.optimizer.warmup=1")
print(json.dumps(rl_loop.main(load_config(Path(sys.argv[2]), settings))))
"""


def run_example(config: Path, address: str) -> None:
    """After the warm start the policy answers with any digit; one is right."""
    words = [sys.executable, "-c", RUN, str(EXAMPLE.parent), str(config)]
    environment = {**os.environ, "POLYREME_ADDRESS": address}
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert after > before + 0.2, done.stdout


@pytest.mark.real
def test_the_teaching_loop_learns(tmp_path: Path) -> None:
    run_example(make_task(tmp_path, lead="#"), "")


@pytest.mark.real
def test_the_teaching_loop_learns_on_a_service(tmp_path: Path) -> None:
    config = make_task(tmp_path, lead="#")
    run = load_config(config)
    with service(tmp_path, run.model.path, "tiny", run.rollout.max_model_len) as running:
        run_example(config, running.url)


def test_the_design_shows_the_lines_of_the_teaching_loop() -> None:
    code = EXAMPLE.read_text()
    assert code.count("\n") < 150
    section = (ROOT / "docs" / "design.md").read_text().partition("## The algorithm on one page")[2].partition("\n## ")[0]
    shown = section.partition("```python\n")[2].partition("```")[0].splitlines()
    lines = {line.strip() for line in code.splitlines()}
    assert len(shown) > 10 and not [line for line in shown if line.strip() not in lines]
