"""Runs `uv pip ...` with pip's settings: python requirements/uv.py install -r requirements/cpu.txt

uv installs several times faster than pip, but reads none of pip's configuration. A machine whose pip.conf or PIP_ variables name an
index, a folder of wheels or a certificate would install from elsewhere, or not at all. Without -q, `install` shows its progress and the
estimated remaining time. uv itself shows progress only on a terminal, and without an estimate. Packages are for the Python that runs
this, or for `--python`.

Invariant: uv's variables that the caller has set are kept; the others are set from pip's configuration.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from progress import run_with_progress

# pip's option, uv's variable, and the separator of its values
VARIABLES = (
    ("index-url", "UV_DEFAULT_INDEX", " "),
    ("extra-index-url", "UV_INDEX", " "),
    ("find-links", "UV_FIND_LINKS", ","),
    ("trusted-host", "UV_INSECURE_HOST", " "),
    ("cert", "SSL_CERT_FILE", " "),
    ("proxy", "ALL_PROXY", " "),
    ("default-timeout", "UV_HTTP_TIMEOUT", " "),
    ("timeout", "UV_HTTP_TIMEOUT", " "),
)


def parse(listing: str) -> dict[str, str]:
    """Returns the options in the output of `pip config list`, lines such as `global.index-url='...'`. The most specific one counts."""
    found: dict[str, str] = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            if line.startswith(section):
                name, _, value = line.removeprefix(section).partition("=")
                found[name] = str(ast.literal_eval(value))
    return found


def environment(options: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for uv: `given`, completed from pip's options."""
    said = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # like pip: takes the requested version from any index that has it
    for option, variable, separator in VARIABLES:
        if values := options.get(option, "").split():
            said[variable] = separator.join(values)
    return {**said, **given}


def cache(prefix: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns uv's setting of a cache in the environment at `prefix` if the user's home cannot be written, else nothing."""
    folder = Path(given.get("XDG_CACHE_HOME") or Path(given.get("HOME") or "/", ".cache"))
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    kept = "UV_CACHE_DIR" in given or (there.is_dir() and os.access(there, os.W_OK))
    return {} if kept else {"UV_CACHE_DIR": str(prefix / "cache")}


def main() -> None:
    folder = Path(sys.executable).parent
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    options = parse(listing)
    no_index = ["--no-index"] if options.get("no-index", "") in ("1", "true", "yes", "on") else []
    into = [] if "--python" in sys.argv else ["--python", sys.executable]
    words = [str(folder / "uv"), "pip", sys.argv[1], *into, *no_index, *sys.argv[2:]]
    given = environment(options, {**os.environ, **cache(Path(sys.prefix), os.environ)})
    if sys.argv[1] == "install" and not {"-q", "--quiet"} & {*sys.argv}:
        sys.exit(run_with_progress(words, given))
    os.execve(words[0], words, given)


if __name__ == "__main__":
    main()
