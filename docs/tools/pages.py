"""A hook of mkdocs: adds pages outside docs/ to the site, and shows the file names of code blocks.

Invariant: every page has one source. Links into docs/ stay within the site. Every fence of a page becomes a code block.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    **{f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")},
    **{
        f"examples/{page.parent.name}/README.md": f"example-{page.parent.name.replace('_', '-')}.md"
        for page in ROOT.glob("examples/*/README.md")
    },
    "README.md": "index.md",
    "examples/recipes/README.md": "recipes.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and adapts their links to the site."""
    for source, page in PAGES.items():
        text = re.sub(r"\]\((\.\./\.\./)?docs/", "](", (ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Adapts links to the pages from outside docs/. Turns `file=NAME` after a fence's language, which the tests read, into the title."""
    for source, page in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)*{re.escape(source)}(#[\w-]+)?\)", rf"]({page}\2)", markdown)
    titled = re.sub(r"^```(\w+) file=(\S+)$", r'```\1 title="\2"', markdown, flags=re.MULTILINE)
    return re.sub(r"^```(\w+) \w+$", r"```\1", titled, flags=re.MULTILINE)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Raises an error for a page with a fence that did not become a code block."""
    if "```" in html:
        raise PluginError(f"{page.file.src_uri}: a fence is rendered as text: {html[html.index('```') :][:60]!r}")
    return html
