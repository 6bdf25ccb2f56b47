"""The Tinker API over HTTP: requests go into the log, results come out of it.

Invariant: the application computes nothing and keeps nothing: a restarted one answers as the one before. An operation that fails is an answer
with `error` and `category`, as the SDK expects it. What the API does not have is refused by name.
"""

import json
import secrets
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.errors import StoreError
from polyreme.experience.requests import LogPlace, RequestLog, in_lane
from polyreme_trainer.service import messages as m
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Folders
from polyreme_trainer.service.http_answers import HEALTH, PREFIX, Handler, endpoint, refused, refused_tenant
from polyreme_trainer.service.wire import Request, parse_batch, read_batch

HOLD_SECONDS = 30.0
"""How long an answer of retrieve_future is held for a result. The SDK asks again at once, and waits 45 seconds itself."""
_AGAIN = 409
_FULL = 429


class ServiceApi:
    """The endpoints of one training service.

    Args:
        log: the request log, within `following`.
        folders: the saved models.
        base_model: the base model's name; tokenizer: where clients find its tokenizer.
        architecture: its model type.
        longest: the largest number of tokens of prompt and answer.
    """

    def __init__(
        self, log: RequestLog, folders: Folders, base_model: str, tokenizer: str, architecture: str, longest: int
    ) -> None:
        self._log, self._folders, self._base_model = log, folders, base_model
        self._tokenizer, self._architecture, self._longest = tokenizer, architecture, longest

    def app(self) -> Starlette:
        """The ASGI application."""
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "unload_model": self._unload,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }
        routes = [Route(f"{PREFIX}/{name}", endpoint(handler), methods=["POST"]) for name, handler in posts.items()]
        routes += [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route(HEALTH, self._health),
            Route(f"{PREFIX}/get_server_capabilities", self._capabilities),
            Route(f"{PREFIX}/samplers/{{name:path}}", self._sampler),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: refused, TenantError: refused_tenant})

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: HttpRequest) -> Response:
        """Whether the request log answers."""
        try:
            await self._log.record("session", "")
        except StoreError as error:
            return JSONResponse({"status": str(error)}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, request: HttpRequest) -> Response:
        model = {"model_name": self._base_model, "max_context_length": self._longest, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def _client_config(self, body: bytes) -> Response:
        # A model's requests come in order: one that overtakes another would be answered with 409.
        return JSONResponse({"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": False})

    async def _dynamic_config(self, body: bytes) -> Response:
        return JSONResponse({})

    async def _telemetry(self, body: bytes) -> Response:
        """Accepted and dropped."""
        return JSONResponse({"status": "accepted"})

    async def _create_session(self, body: bytes) -> Response:
        name = secrets.token_hex(16)
        await self._log.set_record("session", name, {"session": name})
        return JSONResponse({"type": "create_session", "session_id": name})

    async def _heartbeat(self, body: bytes) -> Response:
        given = m.read(m.OfSession, body)
        if not await self._log.renew_record("session", given.session_id):
            raise HTTPException(404, f"expected a session of this service; found {given.session_id!r:.80}")
        return JSONResponse({"type": "session_heartbeat"})

    async def _create_model(self, body: bytes) -> Response:
        given = m.read(m.CreateModel, body)
        await self._check_session(given.session_id)
        self._check_base(given.base_model)
        model = f"{given.session_id}:train:{given.model_seq_id}"
        lora = None if given.lora_config is None else given.lora_config.model_dump()
        await self._set_model(model, lora)
        return await self._into_lane(model, 0, Request("create_model", {"lora": lora}))

    async def _set_model(self, model: str, lora: dict[str, Any] | None) -> None:
        await self._log.set_record("model", model, {"lora": json.dumps(lora)})

    async def _get_info(self, body: bytes) -> Response:
        given = m.read(m.OfModel, body)
        lora = await self._lora_of(given.model_id)
        data = {"arch": self._architecture, "model_name": self._base_model, "tokenizer_id": self._tokenizer}
        about: dict[str, Any] = {
            "is_lora": bool(lora),
            "lora_rank": lora["rank"] if lora else None,
            "model_name": self._base_model,
        }
        return JSONResponse({"type": "get_info", "model_id": given.model_id, "model_data": data, **about})

    async def _lora_of(self, model: str) -> dict[str, Any] | None:
        """The adapters of a model; None: all parameters. Raises HTTPException for an unknown model."""
        record = await self._log.record("model", model)
        if record is None:
            raise HTTPException(404, f"expected a model of this service; found {model!r:.80}")
        await self._log.renew_record("model", model)
        lora: dict[str, Any] | None = json.loads(record["lora"])
        return lora if lora and lora["rank"] else None

    async def _forward_backward(self, body: bytes) -> Response:
        message = parse_batch(body)
        await self._lora_of(message.model_id)
        try:
            read_batch(message)
            request = Request("forward" if message.forward_only else "forward_backward", {}, body)
        except TenantError as error:
            request = Request("refused", {"message": str(error)})
        return await self._into_lane(message.model_id, message.seq_id, request)

    async def _optim_step(self, body: bytes) -> Response:
        given = m.read(m.OptimStep, body)
        return await self._into_lane(given.model_id, given.seq_id, Request("optim_step", {"adam": given.settings.model_dump()}))

    async def _save_weights(self, body: bytes) -> Response:
        given = m.read(m.SaveWeights, body)
        name = m.check_name(given.path or f"request-{given.seq_id}")
        fields = {"name": name, "ttl": given.ttl_seconds, "overwrite": given.overwrite}
        return await self._into_lane(given.model_id, given.seq_id, Request("save_weights", fields))

    async def _save_for_sampler(self, body: bytes) -> Response:
        given = m.read(m.SaveForSampler, body)
        name, session = m.check_name(given.path or f"request-{given.seq_id}"), ""
        if given.path is None and given.sampling_session_seq_id is not None:
            session = f"{given.model_id.partition(':')[0]}:sample:{given.sampling_session_seq_id}"
            path = m.SavedModel(given.model_id, "sampler_weights", name)
            await self._lora_of(given.model_id)
            await self._log.set_record("sampling", session, {"path": str(path)})
        fields = {"name": name, "ttl": given.ttl_seconds, "overwrite": given.overwrite, "sampling_session": session}
        return await self._into_lane(given.model_id, given.seq_id, Request("save_weights_for_sampler", fields))

    async def _load_weights(self, body: bytes) -> Response:
        given = m.read(m.LoadWeights, body)
        fields = {"path": given.path, "optimizer": given.optimizer}
        if given.model_id is not None and given.seq_id is not None:
            return await self._into_lane(given.model_id, given.seq_id, Request("load_weights", fields))
        if given.session_id is None or given.model_seq_id is None:
            raise TenantError("expected model_id and seq_id, or session_id and model_seq_id; found neither")
        await self._check_session(given.session_id)
        facts = self._folders.facts(m.read_path(given.path))
        model = f"{given.session_id}:train:{given.model_seq_id}"
        await self._set_model(model, None if facts.lora is None else facts.lora.model_dump())
        return await self._into_lane(model, 0, Request("create_from", fields))

    async def _unload(self, body: bytes) -> Response:
        given = m.read(m.OfModel, body)
        await self._lora_of(given.model_id)
        return await self._into_lane(given.model_id, await self._log.submitted(given.model_id) + 1, Request("unload_model", {}))

    async def _weights_info(self, body: bytes) -> Response:
        facts = self._folders.facts(m.read_path(m.read(m.TinkerPath, body).tinker_path))
        about: dict[str, Any] = {"base_model": facts.base_model, "is_lora": facts.lora is not None}
        if facts.lora is not None:
            targets = facts.lora.targets
            about |= {
                "lora_rank": facts.lora.rank,
                "train_unembed": False,
                "train_mlp": targets is None or "up_proj" in targets,
                "train_attn": targets is None or "q_proj" in targets,
            }
        return JSONResponse(about)

    async def _create_sampling_session(self, body: bytes) -> Response:
        given = m.read(m.SamplingSession, body)
        await self._check_session(given.session_id)
        name = f"{given.session_id}:sample:{given.sampling_session_seq_id}"
        await self._log.set_record("sampling", name, {"path": self._sampled(given.model_path, given.base_model)})
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    def _sampled(self, path: str | None, base_model: str | None) -> str:
        """The checkpoint to sample from; empty for the base model. Raises TenantError when there is none."""
        if path is None:
            self._check_base(base_model or "")
            return ""
        self._folders.sampled(m.read_path(path))
        return path

    async def _sampler(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        path = (await self._sampling_session(name))["path"]
        return JSONResponse({"sampler_id": name, "base_model": self._base_model, "model_path": path or None})

    async def _sampling_session(self, name: str) -> Any:
        record = await self._log.record("sampling", name)
        if record is None:
            raise HTTPException(404, f"expected a sampling session of this service; found {name!r:.80}")
        await self._log.renew_record("sampling", name)
        return record

    async def _sample(self, body: bytes) -> Response:
        given = m.read(m.Sample, body)
        if given.sampling_session_id is not None:
            if given.seq_id is None:
                raise TenantError("expected seq_id with sampling_session_id; found none")
            path = (await self._sampling_session(given.sampling_session_id))["path"]
            name = f"{given.sampling_session_id}:{given.seq_id}"
        else:
            path, name = self._sampled(given.model_path, given.base_model), f"sample:{secrets.token_hex(16)}"
        options, stop = given.sampling_params, given.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else stop
        fields = {
            "weights": str(self._folders.sampled(m.read_path(path))) if path else None,
            "prompt": [token for chunk in given.prompt.chunks for token in chunk.tokens],
            "samples": given.num_samples,
            "prompt_logprobs": given.prompt_logprobs,
            **options.model_dump(include={"max_tokens", "seed", "temperature", "top_k", "top_p"}),
            "stop_ids": None if stops is None else [each for each in stops if isinstance(each, int)],
            "stop_strings": [each for each in stops or () if isinstance(each, str)],
        }
        ids = [f"{name}:{number}" for number in range(given.num_samples)]
        return await self._submit(LogPlace(name, "sampler"), Request("sample", fields), {"sample_sequence_ids": ids})

    async def _into_lane(self, model: str, seq: int, request: Request) -> Response:
        """Adds a request for a model to the log."""
        await self._lora_of(model)
        return await self._submit(in_lane(model, seq), request, {"model_id": model})

    async def _submit(self, place: LogPlace, request: Request, about: dict[str, Any]) -> Response:
        became = await self._log.submit(place, request.pack())
        if became == "early":
            raise HTTPException(
                _AGAIN, f"expected request {place.seq} after those before it; found none of them yet. Send it again."
            )
        if became == "full":
            raise HTTPException(_FULL, "expected room in the request log; found none. Send the request again later.")
        if became == "gone":
            raise HTTPException(410, f"expected a new request; found {place.id}, which was executed and whose result has expired")
        return JSONResponse({"request_id": place.id, **about})

    async def _retrieve(self, body: bytes) -> Response:
        given = m.read(m.Retrieve, body)
        result = await self._log.result(given.request_id, HOLD_SECONDS)
        if result is not None:
            kind = "application/x-protobuf" if result[:1] == b"P" else "application/json"
            return Response(result[1:], media_type=kind)
        if not await self._log.is_known(given.request_id):
            raise HTTPException(404, f"expected a request of this service; found {given.request_id!r:.80}")
        again = {"type": "try_again", "request_id": given.request_id, "queue_state": "active"}
        return JSONResponse(again, status_code=408)

    async def _check_session(self, name: str) -> None:
        if not await self._log.renew_record("session", name):
            raise HTTPException(404, f"expected a session of this service; found {name!r:.80}")

    def _check_base(self, name: str) -> None:
        if name != self._base_model:
            raise TenantError(f"expected the base model {self._base_model}; found {name!r:.200}")
