"""The page's static files, read and compressed once.

Invariant: an asset's address contains a digest of all assets, so a browser caches an asset permanently and never mixes two
releases. Addresses of another release do not exist.
"""

import gzip
import mimetypes
import re
from functools import cache
from pathlib import Path

import xxhash
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polyreme.page import PATH

STATIC = Path(__file__).parent / "static"
_FOR_GOOD = "public, max-age=31536000, immutable"
_IMPORT = re.compile(rb'from "\./([^"]+)"')


@cache
def _assets() -> dict[str, bytes]:
    files = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css"))
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in files}


@cache
def _compressed() -> dict[str, bytes]:
    return {name: gzip.compress(content, mtime=0) for name, content in _assets().items()}


@cache
def _digest() -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(_assets().values()))


@cache
def index_page() -> str:
    """The HTML of the page. It lists every module of the first view, so that a browser loads them all at once instead of one
    import after the other."""
    hints = "".join(f'<link rel="modulepreload" href="static/{name}">\n' for name in sorted(_imported("app.js")))
    text = (STATIC / "index.html").read_text().replace("</head>", f"{hints}</head>")
    return text.replace('"static/', f'"static/{_digest()}/')


def _imported(name: str) -> set[str]:
    """The modules that a module imports statically, including indirect imports."""
    names = {found.decode() for found in _IMPORT.findall(_assets()[name])}
    return names.union(*map(_imported, names))


def asset_route(headers: dict[str, str]) -> Route:
    """Serves the assets, with `headers`."""

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _assets() or request.path_params["digest"] != _digest():
            return Response(status_code=404, headers=headers)
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        content = _compressed()[name] if zipped else _assets()[name]
        extra = {"cache-control": _FOR_GOOD, "vary": "accept-encoding"} | ({"content-encoding": "gzip"} if zipped else {})
        return Response(content, headers=headers | extra, media_type=mimetypes.guess_type(name)[0])

    return Route(f"{PATH}/static/{{digest}}/{{name:path}}", asset)
