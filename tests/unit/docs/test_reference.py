"""The generated pages match the current code."""

import importlib.util
from pathlib import Path

import pytest

from polyreme.experience.store_errors import USER_RULES

DOCS = Path(__file__).resolve().parents[3] / "docs"
spec = importlib.util.spec_from_file_location("reference_pages", DOCS / "tools" / "reference.py")
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (DOCS / "reference" / f"{name}.md").read_text() == reference.PAGES[name](), "run make reference"


def test_every_command_and_status_is_there() -> None:
    page = reference.command_page()
    for name in ("up", "audit", "config check", "train", "learner", "rollout", "reward"):
        assert f"`polyreme {name}`" in page
    assert [status for status, _ in reference.exit_statuses()] == [1, 2, 2, 3, 4, 5, 6, 7]


def test_every_service_has_its_metrics() -> None:
    page = reference.metrics_page()
    for name in ("polyreme_rollout_version", "polyreme_reward_outcomes_total", "polyreme_cpu_seconds_total"):
        assert f"| `{name}` |" in page


def test_the_page_of_the_log_has_the_rights_of_a_redis_user() -> None:
    assert f"\nACL SETUSER polyreme on >PASSWORD {USER_RULES}\n" in (DOCS / "reference" / "log.md").read_text()
