"""The REST part of the Tinker API: a tenant's sessions, training runs and checkpoints, and the files of external weights.

A training run is a model. Invariant: a tenant sees its own only. The address of a file is signed and expires, and needs no key.
"""

import asyncio
import hashlib
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from polyreme.experience.requests import RequestLog
from polyreme_trainer.service import messages as m
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import FACTS, Folders, KeptCheckpoint
from polyreme_trainer.service.http_answers import tenant_of
from polyreme_trainer.service.submission import unload
from polyreme_trainer.service.tenants import TenantModel, Tenants
from polyreme_trainer.service.wire import ENDED

LINK_SECONDS = 3600
"""How long the address of a file is valid."""
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_MOST = 1000
_RUN = "/training_runs/{model}"
_CHECKPOINT = _RUN + "/checkpoints/{kind}/{name}"
_NOT_SUPPORTED = {
    ("POST", "/copy_weights"): "copies of checkpoints (copy_weights)",
    ("POST", _CHECKPOINT + "/publish"): "publication of checkpoints",
    ("DELETE", _CHECKPOINT + "/publish"): "publication of checkpoints",
    ("PUT", "/sessions/{session}/project"): "projects",
    ("GET", "/sessions/{session}/trace_export"): "traces of sessions",
    ("POST", "/sessions/search"): "a search for sessions",
    ("POST", "/create_custom_loss"): "custom losses on the server; forward_backward_custom computes them in the client",
    ("POST", "/join_sampling_session"): "join_sampling_session",
    ("POST", "/retrieve_futures"): "retrieve_futures; ask for each with retrieve_future",
    ("POST", "/cancel_future"): "cancel_future",
    ("POST", "/auth/token"): "tokens in place of keys",
    ("GET", "/audit"): "an audit log",
    ("GET", "/billing/usage/events"): "billing",
    ("GET", "/billing/usage/checkpoints/current"): "billing",
}
AnyItem = TypeVar("AnyItem")


class RestRoutes:
    """The routes of one training service. Its arguments are those of `ServiceApi`."""

    def __init__(self, log: RequestLog, folders: Folders, base_model: str, signing_key: str) -> None:
        self._log, self._folders, self._tenants, self._base_model = log, folders, Tenants(log), base_model
        self._key = signing_key.encode()

    def routes(self, prefix: str) -> list[Route]:
        """The routes below `prefix`."""
        handlers: dict[tuple[str, str], Callable[[HttpRequest], Awaitable[Response]]] = {
            ("GET", "/sessions"): self._sessions,
            ("GET", "/sessions/{session}"): self._session,
            ("POST", "/sessions/{session}/finish"): self._finish,
            ("GET", "/training_runs"): self._runs,
            ("GET", _RUN): self._run,
            ("GET", _RUN + "/checkpoints"): self._run_checkpoints,
            ("GET", "/checkpoints"): self._checkpoints,
            ("DELETE", _CHECKPOINT): self._delete,
            ("PUT", _CHECKPOINT + "/ttl"): self._ttl,
            ("GET", _CHECKPOINT + "/external_weights_urls"): self._urls,
            ("GET", "/files/{model}/{name}/{file}"): self._file,
        }
        handlers |= {place: partial(_refuse, what) for place, what in _NOT_SUPPORTED.items()}
        return [Route(prefix + path, handler, methods=[method]) for (method, path), handler in handlers.items()]

    async def _sessions(self, request: HttpRequest) -> Response:
        names = await self._log.names("session", tenant_of(request))
        return JSONResponse({"sessions": _page(request, names, 20)[0]})

    async def _session(self, request: HttpRequest) -> Response:
        name = request.path_params["session"]
        session = await self._tenants.session(tenant_of(request), name)
        runs, samplers = await self._log.names("model", name), await self._log.names("sampling", name)
        about = {"user_metadata": json.loads(session["metadata"]) or None, "display_name": session["display_name"] or None}
        return JSONResponse({"training_run_ids": runs, "sampler_ids": samplers, **about})

    async def _finish(self, request: HttpRequest) -> Response:
        """Ends a session and unloads its models, after their requests. Its checkpoints stay."""
        tenant, name = tenant_of(request), request.path_params["session"]
        given = m.read(m.FinishSession, await request.body())
        if ENDED not in await self._tenants.session(tenant, name):
            for model in await self._log.names("model", name):
                await unload(self._log, model)
            await self._tenants.finish_session(tenant, name, given.reason.type)
        return Response(status_code=204)

    async def _runs(self, request: HttpRequest) -> Response:
        tenant = tenant_of(request)
        names, cursor = _page(request, await self._log.names("model", tenant), 20)
        runs = []
        for name in names:
            try:
                runs.append(await self._about(tenant, await self._tenants.model(tenant, name)))
            except HTTPException:  # it has expired
                continue
        return JSONResponse({"training_runs": runs, "cursor": cursor})

    async def _run(self, request: HttpRequest) -> Response:
        tenant = tenant_of(request)
        return JSONResponse(await self._about(tenant, await self._tenants.model(tenant, request.path_params["model"])))

    async def _about(self, tenant: str, model: TenantModel) -> dict[str, object]:
        kept = await asyncio.to_thread(self._folders.kept, model.name, tenant)
        newest = {each.name.kind: _checkpoint(each) for each in kept}
        return {
            "training_run_id": model.name,
            "base_model": model.base_model,
            "model_owner": tenant,
            "is_lora": model.rank > 0,
            "lora_rank": model.rank or None,
            "last_request_time": _time(model.used),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": model.metadata or None,
        }

    async def _run_checkpoints(self, request: HttpRequest) -> Response:
        """Those of a model that has expired, too."""
        model = m.check_model(request.path_params["model"])
        kept = await asyncio.to_thread(self._folders.kept, model, tenant_of(request))
        return JSONResponse({"checkpoints": [_checkpoint(each) for each in kept]})

    async def _checkpoints(self, request: HttpRequest) -> Response:
        kept, cursor = _page(request, await asyncio.to_thread(self._all_of, tenant_of(request)), 100)
        return JSONResponse({"checkpoints": [_checkpoint(each) for each in kept], "cursor": cursor})

    def _all_of(self, tenant: str) -> list[KeptCheckpoint]:
        """All checkpoints of a tenant, the newest first."""
        kept = [each for model in self._folders.models() for each in self._folders.kept(model, tenant)]
        return sorted(kept, key=lambda each: each.facts.created, reverse=True)

    async def _delete(self, request: HttpRequest) -> Response:
        await asyncio.to_thread(self._folders.delete, _named(request), tenant_of(request))
        return Response(status_code=204)

    async def _ttl(self, request: HttpRequest) -> Response:
        seconds = m.read(m.Ttl, await request.body()).ttl_seconds
        expires = None if seconds is None else time.time() + seconds
        await asyncio.to_thread(self._folders.set_expiry, _named(request), tenant_of(request), expires)
        return Response(status_code=204)

    async def _urls(self, request: HttpRequest) -> Response:
        checkpoint, expires = _named(request), int(time.time()) + LINK_SECONDS
        if checkpoint.kind != "external_weights":
            raise TenantError(f"expected a checkpoint that save_weights_external wrote; found {checkpoint}")
        self._folders.facts(checkpoint, tenant_of(request))
        names = sorted(file.name for file in self._folders.folder(checkpoint).iterdir() if file.name != FACTS)
        root = f"{str(request.base_url).rstrip('/')}{request.url.path.partition('/training_runs')[0]}/files"
        urls = {
            name: f"{root}/{quote(checkpoint.model)}/{checkpoint.name}/{name}?expires={expires}"
            f"&signature={self._signature(checkpoint, name, expires)}"
            for name in names
        }
        return JSONResponse({"urls": urls, "expires": _time(expires)})

    async def _file(self, request: HttpRequest) -> Response:
        given, query = request.path_params, request.query_params
        checkpoint = m.read_path(f"tinker://{given['model']}/external_weights/{given['name']}")
        file, expires = m.check_name(given["file"]), query.get("expires", "")
        known = expires.isdecimal() and len(expires) < 12 and int(expires) > time.time()
        if not (known and hmac.compare_digest(query.get("signature", ""), self._signature(checkpoint, file, int(expires)))):
            raise HTTPException(403, "expected an address from get_external_weights_urls; found another one, or it has expired")
        path = self._folders.folder(checkpoint) / file
        if not path.is_file():
            raise HTTPException(404, f"expected a file of {checkpoint}; found none, since it was deleted")
        return FileResponse(path)

    def _signature(self, checkpoint: m.SavedModel, file: str, expires: int) -> str:
        return hmac.new(self._key, f"{checkpoint} {file} {expires}".encode(), hashlib.sha256).hexdigest()


async def _refuse(what: str, request: HttpRequest) -> Response:
    raise TenantError(f"not supported: {what}")


def _named(request: HttpRequest) -> m.SavedModel:
    given = request.path_params
    return m.read_path(f"tinker://{given['model']}/{given['kind']}/{given['name']}")


def _page(request: HttpRequest, items: Sequence[AnyItem], limit: int) -> tuple[list[AnyItem], dict[str, int]]:
    """The items that a request asks for, and the cursor of its answer."""
    query = request.query_params
    if query.get("project_id"):
        raise TenantError("not supported: project_id; a tenant's key is its only project")
    given = m.read_tree(m.Page, {"limit": query.get("limit", limit), "offset": query.get("offset", 0)})
    part = list(items[given.offset : given.offset + min(given.limit, _MOST)])
    return part, {"offset": given.offset, "limit": given.limit, "total_count": len(items)}


def _checkpoint(kept: KeptCheckpoint) -> dict[str, object]:
    facts = kept.facts
    return {
        "checkpoint_id": f"{kept.name.kind}/{kept.name.name}",
        "checkpoint_type": _TYPES[kept.name.kind],
        "time": _time(facts.created),
        "tinker_path": str(kept.name),
        "size_bytes": kept.nbytes,
        "public": False,
        "user_metadata": dict(facts.metadata) or None,
        "expires_at": None if facts.expires is None else _time(facts.expires),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
