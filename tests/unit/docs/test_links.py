"""Links between the pages have existing targets, and the site's navigation has every page once.

Invariant: links are relative to their page in the repository. Anchors are those of headings, by the rules of mkdocs and GitHub.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def text_of(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    slugs = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(text_of(page)))
    return {re.sub(r"\s", "-", slug) for slug in slugs}


def broken(page: Path) -> Iterator[str]:
    for target, anchor in LINK.findall(text_of(page)):
        file = (page.parent / target).resolve() if target else page
        if not file.exists():
            yield target
        elif anchor and anchor not in anchors(file):
            yield f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `heading`, here\n[a](#a-heading-here) [b](#nowhere) [c](missing.md) [d](page.md#a-heading-here)\n")
    assert list(broken(page)) == ["#nowhere", "missing.md"]


def named(navigation: Any) -> Iterator[str]:
    match navigation:
        case str():
            yield navigation
        case dict():
            for part in navigation.values():
                yield from named(part)
        case list():
            for part in navigation:
                yield from named(part)


def test_the_navigation_has_every_page_once() -> None:
    found = list(named(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(found) == len(set(found))
    docs = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert docs <= set(found)
