"""The Tinker API over HTTP: requests go into the log, results come out of it.

Invariant: the application computes nothing and keeps nothing: a restarted one answers as the one before. An operation that fails
is an answer with `error` and `category`, as the SDK expects it. What the API does not have is refused by name.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.errors import StoreError
from polyreme.experience.requests import LogPlace, RequestLog, in_lane
from polyreme.process.lifecycle import until_set
from polyreme_trainer.service import messages as m
from polyreme_trainer.service.accounts import Accounts, RequireAccount
from polyreme_trainer.service.agents.sessions import AgentSessions
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import Folders
from polyreme_trainer.service.http_answers import HEALTH, PREFIX, ApiCall, Handler, endpoint, refused, tenant_of
from polyreme_trainer.service.rest import RestRoutes
from polyreme_trainer.service.submission import submit, unload
from polyreme_trainer.service.tenants import TenantModel, Tenants
from polyreme_trainer.service.wire import ENDED, Request, parse_batch, read_batch

_LARGE = 1 << 20
"""Bytes of a batch that is read in a thread. (Others stay in the order in which they come.)"""


class ServiceApi:
    """The endpoints of one training service.

    Args:
        log: the request log, within `following`.
        folders: the saved models.
        base_model: the base model's name; tokenizer: where clients find its tokenizer.
        architecture: its model type.
        longest: the largest number of tokens of prompt and answer.
        signing_key: of the addresses of files.
        accounts: who may use it, and how much; None: everybody, within the default bounds.
        hold_seconds: how long the answer to `retrieve_future` is held for a result.
        agents: the sessions of agents; None: it has none.
        ending: set when the process ends: answers are not held any more, and their clients ask again.
    """

    def __init__(
        self,
        log: RequestLog,
        folders: Folders,
        base_model: str,
        tokenizer: str,
        architecture: str,
        longest: int,
        signing_key: str,
        accounts: Accounts | None = None,
        hold_seconds: float = 30.0,
        ending: asyncio.Event | None = None,
        agents: AgentSessions | None = None,
    ) -> None:
        self._hold_seconds, self._ending = hold_seconds, ending or asyncio.Event()
        self._accounts, self._agents = accounts or Accounts(), agents
        self._log, self._folders, self._base_model = log, folders, base_model
        self._critic = m.name_of(base_model, critic=True)
        self._tenants, self._rest = Tenants(log), RestRoutes(log, folders, base_model, signing_key)
        self._tokenizer, self._architecture, self._longest = tokenizer, architecture, longest

    def app(self) -> Starlette:
        """The ASGI application."""
        posts: dict[str, Handler] = {
            # A model's requests come in order: one that overtakes another would be answered with 409.
            "client/config": _always(parallel_fwdbwd_chunks=False, proto_compress_fwdbwd=False),
            "client/dynamic_config": _always(),
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": _always(status="accepted"),  # and dropped
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._in_order(m.OptimStep, self._optim_step),
            "save_weights": self._in_order(m.SaveWeights, self._save_weights),
            "save_weights_for_sampler": self._in_order(m.SaveForSampler, self._save_for_sampler),
            "save_weights_external": self._in_order(m.SaveExternal, self._save_external),
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
            *self._rest.routes(PREFIX),
            *([] if self._agents is None else self._agents.routes(PREFIX, self._agent_weights)),
        ]
        handlers = dict.fromkeys((HTTPException, TenantError, StoreError), refused)
        guard = Middleware(RequireAccount, accounts=self._accounts)
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[guard])

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

    async def _create_session(self, call: ApiCall) -> Response:
        given, name = m.read(m.CreateSession, call.body), f"{call.tenant}{secrets.token_hex(8)}"
        fields = {"metadata": json.dumps(given.user_metadata), "display_name": given.display_name}
        await self._tenants.add_record(call.tenant, "session", name, fields, self._accounts.quota_of(call.tenant).sessions)
        return JSONResponse({"type": "create_session", "session_id": name})

    async def _heartbeat(self, call: ApiCall) -> Response:
        session = await self._tenants.session(call.tenant, m.read(m.OfSession, call.body).session_id)
        if ENDED in session:
            raise HTTPException(410, "expected a session that goes on; found one that its client has finished")
        return JSONResponse({"type": "session_heartbeat"})

    async def _create_model(self, call: ApiCall) -> Response:
        given = m.read(m.CreateModel, call.body)
        if not (critic := given.base_model == self._critic):
            self._check_base(given.base_model)
        lora = None if given.lora_config is None else given.lora_config.model_dump()
        model = await self._add_model(call, given, given.base_model, lora)
        return await self._into_lane(call, model, 0, Request("create_model", {"lora": lora, "critic": critic}))

    async def _add_model(
        self, call: ApiCall, given: m.CreateModel | m.LoadWeights, base_model: str, lora: dict[str, object] | None
    ) -> TenantModel:
        """The new model of a session that goes on."""
        if given.session_id is None or given.model_seq_id is None:
            raise TenantError("expected model_id and seq_id, or session_id and model_seq_id; found neither")
        await self._tenants.open_session(call.tenant, given.session_id)
        most = self._accounts.quota_of(call.tenant).models
        about = base_model, lora, given.user_metadata
        name = await self._tenants.add_model(call.tenant, given.session_id, given.model_seq_id, *about, most)
        return await self._tenants.model(call.tenant, name)

    async def _get_info(self, call: ApiCall) -> Response:
        given = m.read(m.OfModel, call.body)
        model = await self._tenants.model(call.tenant, given.model_id)
        data = {"arch": self._architecture, "model_name": model.base_model, "tokenizer_id": self._tokenizer}
        about = {"is_lora": model.rank > 0, "lora_rank": model.rank or None, "model_name": model.base_model}
        return JSONResponse({"type": "get_info", "model_id": given.model_id, "model_data": data, **about})

    async def _forward_backward(self, call: ApiCall) -> Response:
        message = parse_batch(call.body)
        m.check_seq(message.seq_id)
        model = await self._tenants.model(call.tenant, message.model_id)
        try:
            large = len(call.body) > _LARGE  # a million datums take a minute, in which others have their answers
            read = await asyncio.to_thread(read_batch, message) if large else read_batch(message)
            m.check_length(max(map(len, read.batch.inputs)), self._longest)
            request = Request("forward" if message.forward_only else "forward_backward", {}, call.body)
        except TenantError as error:
            request = Request("refused", {"message": str(error)})
        return await self._into_lane(call, model, message.seq_id, request)

    def _in_order(self, kind: type[m.AnyMessage], build: Callable[[ApiCall, m.AnyMessage], Awaitable[Request]]) -> Handler:
        """The handler of a request for a model, which `build` reads. One that cannot be executed has its place in the order, too:
        the client's next one has the next number."""

        async def answer(call: ApiCall) -> Response:
            name, seq = m.read_place(call.body)
            model = await self._tenants.model(call.tenant, name)
            try:
                request = await build(call, m.read(kind, call.body))
            except TenantError as error:
                request = Request("refused", {"message": str(error)})
            return await self._into_lane(call, model, seq, request)

        return answer

    async def _optim_step(self, call: ApiCall, given: m.OptimStep) -> Request:
        return Request("optim_step", {"adam": given.settings.model_dump()})

    async def _save_weights(self, call: ApiCall, given: m.SaveWeights) -> Request:
        name = m.check_name(given.name)
        return Request("save_weights", {"name": name, "overwrite": given.overwrite, **_kept_as(call, given)})

    async def _save_external(self, call: ApiCall, given: m.SaveExternal) -> Request:
        return Request("save_weights_external", {"name": m.check_name(given.path), "overwrite": False, **_kept_as(call, given)})

    async def _save_for_sampler(self, call: ApiCall, given: m.SaveForSampler) -> Request:
        name, session = m.check_name(given.name), ""
        if given.path is None and given.sampling_session_seq_id is not None:
            path = m.SavedModel(given.model_id, "sampler_weights", name)
            of, number = given.model_id.partition(":")[0], given.sampling_session_seq_id
            session = await self._tenants.add_sampling(call.tenant, of, number, str(path))
        fields = {"name": name, "overwrite": given.overwrite, "sampling_session": session, **_kept_as(call, given)}
        return Request("save_weights_for_sampler", fields)

    async def _load(self, call: ApiCall, given: m.LoadWeights) -> Request:
        return Request("load_weights", {"path": given.path, "optimizer": given.optimizer, "tenant": call.tenant})

    async def _load_weights(self, call: ApiCall) -> Response:
        """Into a model, or as a new one."""
        if m.has_place(call.body):
            return await self._in_order(m.LoadWeights, self._load)(call)
        given = m.read(m.LoadWeights, call.body)
        facts = self._folders.facts(m.read_path(given.path), call.tenant)
        if given.base_model not in (None, facts.base_model):
            raise TenantError(f"expected a checkpoint of {given.base_model:.200}; found one of {facts.base_model}")
        lora = None if facts.lora is None else facts.lora.model_dump()
        model = await self._add_model(call, given, facts.base_model, lora)
        return await self._into_lane(call, model, 0, Request("create_from", (await self._load(call, given)).fields))

    async def _unload(self, call: ApiCall) -> Response:
        given = m.read(m.OfModel, call.body)
        await self._tenants.model(call.tenant, given.model_id)
        place = await unload(self._log, given.model_id)
        return JSONResponse({"request_id": place.id, "model_id": given.model_id})

    async def _weights_info(self, call: ApiCall) -> Response:
        facts = self._folders.facts(m.read_path(m.read(m.TinkerPath, call.body).tinker_path), call.tenant)
        about: dict[str, object] = {"base_model": facts.base_model, "is_lora": facts.lora is not None}
        if facts.lora is not None:
            targets = facts.lora.targets
            about |= {
                "lora_rank": facts.lora.rank,
                "train_unembed": False,
                "train_mlp": targets is None or "up_proj" in targets,
                "train_attn": targets is None or "q_proj" in targets,
            }
        return JSONResponse(about)

    async def _create_sampling_session(self, call: ApiCall) -> Response:
        given = m.read(m.SamplingSession, call.body)
        await self._tenants.open_session(call.tenant, given.session_id)
        path = self._sampled(call.tenant, given.model_path, given.base_model)
        name = await self._tenants.add_sampling(call.tenant, given.session_id, given.sampling_session_seq_id, path)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    def _sampled(self, tenant: str, path: str | None, base_model: str | None) -> str:
        """The checkpoint to sample from; empty for the base model. Raises TenantError when there is none."""
        if path is None:
            if base_model == self._critic:
                raise TenantError(f"not supported: sampling from {base_model}, which has values and no tokens")
            self._check_base(base_model or "")
            return ""
        self._folders.sampled(m.read_path(path), tenant)
        return path

    async def _agent_weights(self, tenant: str, given: m.OpenAgentSession) -> str:
        """The directory of an agent session's weights; empty: the base model. Raises TenantError or HTTPException without one."""
        if given.sampling_session_id is not None:
            path = await self._tenants.sampling(tenant, given.sampling_session_id)
        else:
            path = self._sampled(tenant, given.model_path, given.base_model or self._base_model)
        return str(self._folders.sampled(m.read_path(path), tenant)) if path else ""

    async def _sampler(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        path = await self._tenants.sampling(tenant_of(request), name)
        return JSONResponse({"sampler_id": name, "base_model": self._base_model, "model_path": path or None})

    async def _sample(self, call: ApiCall) -> Response:
        given = m.read(m.Sample, call.body)
        if given.sampling_session_id is not None:
            if given.seq_id is None:
                raise TenantError("expected seq_id with sampling_session_id; found none")
            path = await self._tenants.sampling(call.tenant, given.sampling_session_id)
            name = f"{given.sampling_session_id}:{given.seq_id}"
        else:
            path, name = self._sampled(call.tenant, given.model_path, given.base_model), f"{call.tenant}-{secrets.token_hex(16)}"
        prompt = [token for chunk in given.prompt.chunks for token in chunk.tokens]
        if len(prompt) >= self._longest:
            raise TenantError(f"expected a prompt of at most {self._longest - 1} tokens; found {len(prompt)}")
        options, stop = given.sampling_params, given.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else stop
        strings = [each for each in stops or () if isinstance(each, str)]
        fields = {
            "weights": str(self._folders.sampled(m.read_path(path), call.tenant)) if path else None,
            "prompt": prompt,
            "samples": given.num_samples,
            "prompt_logprobs": given.prompt_logprobs,
            "prompt_logprobs_last": given.prompt_logprobs_last_n,
            "topk": given.topk_prompt_logprobs,
            **options.model_dump(include={"max_tokens", "seed", "temperature", "top_k", "top_p"}),
            # The model's own end tokens also end an answer that has stop strings: the cookbook reads at most one in it.
            "stop_ids": None if stops is None or strings else list(stops),
            "stop_strings": strings,
        }
        ids = [f"{name}:{number}" for number in range(given.num_samples)]
        most, place = self._accounts.quota_of(call.tenant).requests, LogPlace(name, "sampler")
        return await submit(self._log, place, Request("sample", fields), {"sample_sequence_ids": ids}, most)

    async def _into_lane(self, call: ApiCall, model: TenantModel, seq: int, request: Request) -> Response:
        """Adds a request for a model to the log. Raises TenantError for one after that which unloads the model."""
        if model.is_unloaded and seq >= await self._log.submitted(model.name):
            raise TenantError("expected a model; found one that was unloaded. Create one from its checkpoint.")
        most = self._accounts.quota_of(call.tenant).requests
        return await submit(self._log, in_lane(model.name, seq), request, {"model_id": model.name}, most)

    async def _retrieve(self, call: ApiCall) -> Response:
        given = m.read(m.Retrieve, call.body)
        await self._tenants.check_request(call.tenant, given.request_id)
        result = None
        async with until_set(self._ending):
            result = await self._log.result(given.request_id, self._hold_seconds)
        if result is None and await self._log.is_open(given.request_id):
            state = await self._log.queue_state(given.request_id)
            again = {"type": "try_again", "request_id": given.request_id, "queue_state": state}
            return JSONResponse(again, status_code=408)
        result = result or await self._log.result(given.request_id)  # it may just have ended
        if result is None and await self._log.is_past(given.request_id):
            raise HTTPException(410, f"expected a result that is kept; found {given.request_id!r:.80}, whose result has expired")
        if result is None:
            raise HTTPException(404, f"expected a request of this service; found {given.request_id!r:.80}")
        return Response(result[1:], media_type="application/x-protobuf" if result[:1] == b"P" else "application/json")

    def _check_base(self, name: str) -> None:
        if name != self._base_model:
            raise TenantError(f"expected the base model {self._base_model}; found {name!r:.200}")


def _always(**content: object) -> Handler:
    """Gives the same answer to every request."""

    async def answer(call: ApiCall) -> Response:
        return JSONResponse(content)

    return answer


def _kept_as(call: ApiCall, given: m.SaveWeights | m.SaveExternal) -> dict[str, object]:
    """What a checkpoint's facts have from its request."""
    return {"tenant": call.tenant, "ttl": given.ttl_seconds, "metadata": given.user_metadata}
