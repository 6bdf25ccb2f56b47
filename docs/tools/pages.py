"""A hook of mkdocs: pages of the repository's top level are pages of the site too.

Invariant: a page has one source. Links into docs/ stay within the site.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, with their links as the site needs them."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for other, address in PAGES.items():
            text = text.replace(f"]({other})", f"]({address})")
        files.append(File.generated(config, page, content=text))
    return files
