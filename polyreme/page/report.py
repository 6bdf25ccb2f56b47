"""`polyreme report`: writes the page of some runs as one HTML file that needs no server.

Invariant: the file contains its data, styles and scripts, and loads nothing. It shows the same views as the page, with the newest
samples and the samples of some evenly spaced iterations.
"""

import base64
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyreme.errors import ConfigError
from polyreme.page import answers
from polyreme.page.assets import STATIC
from polyreme.page.runs import Runs
from polyreme.rundir.reader import RunReader, SampleQuery, run_directories
from polyreme.rundir.reader.series import AXES
from polyreme.rundir.run_records import write_atomically

CURVE_POINTS = 300
TIMELINE_ITERATIONS = 12
CLASSIC = ("vendor/uplot.js", "vendor/diff.js")
"""The scripts that are not modules."""
_SCRIPT = re.compile(r'<script src="static/([^"]+)"[^>]*></script>\n')
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
_IMPORT = re.compile(r'(from |import\()"\./([^"]+)"')


def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run directories, or directories of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    samples: Annotated[int, typer.Option(min=0, help="Maximum number of samples per run in the file.")] = 400,
) -> None:
    """Write one offline HTML file that compares runs."""
    if (out.exists() and not out.is_file()) or not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise ConfigError(
            "a file in a folder that can be written for --out", str(out), "Create the folder, or choose another file."
        )
    for path in run_dirs:
        run_directories(path)  # raises when there is none
    runs = Runs(run_dirs)
    for reader in runs.readers.values():
        reader.catch_up()
    write_atomically(out, page(embedded(runs.readers, samples)))
    Console().print(f"{len(runs.readers)} run(s) in {out}, {out.stat().st_size / 2**20:.1f} MiB", soft_wrap=True, highlight=False)


def embedded(readers: Mapping[str, RunReader], samples: int) -> dict[str, object]:
    """The data of the page: the responses of the server."""
    return {
        "runs": [answers.overview(name, reader, True) for name, reader in readers.items()],
        "finals": {name: answers.final_values(reader) for name, reader in readers.items()},
        "curves": {
            name: answers.curves(reader, dict.fromkeys((*reader.contents().metrics, *AXES), -1), CURVE_POINTS)
            for name, reader in readers.items()
        },
        "details": {name: answers.details(reader) for name, reader in readers.items()},
        "samples": {name: chosen_samples(reader, samples) for name, reader in readers.items()},
        "timelines": {name: newest_timeline(reader) for name, reader in readers.items()},
    }


def newest_timeline(reader: RunReader) -> dict[str, object]:
    """The timeline of the newest iterations."""
    newest = reader.contents().iterations
    return answers.timeline(reader, newest - TIMELINE_ITERATIONS + 1, newest)


def chosen_samples(reader: RunReader, count: int) -> list[answers.Answer]:
    """Up to `count` samples in detail: half from the newest evaluation answers and samples, half of evenly spaced iterations."""
    newest = reader.find_samples(SampleQuery(order="newest"), limit=count // 2)[1]
    chosen = {sample["id"] for sample in newest}
    steps, left = spread(reader.contents().iterations, 10), count - len(chosen)
    for step in steps:
        found = reader.find_samples(SampleQuery(kind="train", first=step, last=step, order="oldest"), limit=left // len(steps))[1]
        chosen |= {sample["id"] for sample in found}
    lives = (answers.life(reader, each) for each in sorted(chosen))
    return [{**life, "peers": [peer for peer in life["peers"] if peer["id"] in chosen]} for life in lives if life]


def spread(last: int, count: int) -> list[int]:
    """At most `count` evenly spaced numbers from 1 to `last`, including both ends."""
    if last < 1:
        return []
    return sorted({1 + round(place * (last - 1) / max(1, count - 1)) for place in range(count)})


def page(data: Mapping[str, object]) -> str:
    """The HTML file with `data` embedded."""
    text = (STATIC / "index.html").read_text()
    scripts = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")}
    modules = sorted(scripts - set(CLASSIC))
    text = _STYLE.sub(lambda found: f"<style>{(STATIC / found[1]).read_text()}</style>", _SCRIPT.sub("", text))
    values = answers.to_json(data).replace("<", "\\u003c")  # "<!--" and "<script" change what ends a script
    parts = [
        f'<script type="application/json" id="embedded">{values}</script>',
        *(f"<script>{_inline(name)}</script>" for name in CLASSIC),
        f'<script type="importmap">{json.dumps({"imports": module_urls(modules)})}</script>',
        '<script type="module">import "page/app.js";</script>',
    ]
    return text.replace("</body>", "\n".join(parts) + "\n</body>")


def module_urls(names: Sequence[str]) -> dict[str, str]:
    """The modules as data: URLs, by the names they import each other, since relative imports fail in a single file."""
    urls = {}
    for name in names:
        source = _IMPORT.sub(r'\1"page/\2"', (STATIC / name).read_text())
        urls[f"page/{name}"] = "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()
    return urls


def _inline(name: str) -> str:
    return (STATIC / name).read_text().replace("</script", "<\\/script")
