"""What people write about a run: tags and a note, in `notes.json` in its directory.

Invariant: it is the only file of a run that the page writes, as a whole and only for a browser on the same machine whose page is
this server's. A reader sees the old content or the new one.
"""

import json
import threading
from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from polyreme.errors import UnavailableError
from polyreme.rundir.run_records import write_atomically

NOTES = "notes.json"
TAGS, TAG_LENGTH, NOTE_LENGTH = 20, 40, 4000
"""The largest number of tags, and lengths in characters."""
_writing = threading.Lock()  # the page has several threads
_LOCAL = ("127.0.0.1", "::1", "localhost")


def read_notes(run_dir: Path) -> dict[str, object]:
    """The run's `tags`, a list of texts, and its `note`. Empty where the file is missing or not what `write_notes` wrote."""
    try:
        return _stored(run_dir)
    except (OSError, ValueError):
        return {"tags": [], "note": ""}


def _stored(run_dir: Path) -> dict[str, object]:
    """As `read_notes`. Raises ValueError for another content, which a change must not replace."""
    try:
        return checked(json.loads((run_dir / NOTES).read_text()))
    except FileNotFoundError:
        return {"tags": [], "note": ""}


def write_notes(run_dir: Path, body: bytes) -> dict[str, object]:
    """Replaces the run's tags, its note or both by those of a JSON body, and returns both.

    Raises:
        ValueError: the body is not {"tags": [...], "note": "..."} within the limits, or one of the two, or the file is damaged.
        UnavailableError: the file cannot be written.
    """
    given = json.loads(body)
    with _writing:
        try:
            notes = checked({**_stored(run_dir), **given} if isinstance(given, dict) else given)
            write_atomically(run_dir / NOTES, json.dumps(notes) + "\n")
        except OSError as error:
            wanted = f"a {NOTES} that can be written in {run_dir}"
            raise UnavailableError(wanted, str(error), "Make the directory writable.") from None
    return notes


def checked(value: object) -> dict[str, object]:
    """`value` as tags, each once, and a note. Raises ValueError."""
    match value:
        case {"tags": list(tags), "note": str(note), **rest} if not rest and all(isinstance(tag, str) for tag in tags):
            tags = list(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
            if len(tags) <= TAGS and all(len(tag) <= TAG_LENGTH and "," not in tag for tag in tags) and len(note) <= NOTE_LENGTH:
                return {"tags": tags, "note": note}
    raise ValueError(
        f"expected at most {TAGS} tags of at most {TAG_LENGTH} characters without commas, and a note of at most {NOTE_LENGTH}"
        " characters"
    )


def is_local(request: Request) -> bool:
    """Whether a request comes from this machine and a page of this server: not from another web site that the user visits."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin")
    named = urlsplit(f"//{host}").hostname
    return (
        request.client is not None
        and request.client.host in _LOCAL
        and named in _LOCAL
        and (origin is None or urlsplit(origin).netloc == host)
        and request.headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")
    )
