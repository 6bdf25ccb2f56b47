"""Requests of the API on their way into the log.

Invariant: a request that the log does not take has an answer that says whether to send it again.
"""

import time

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from polyreme.experience.requests import LogPlace, RequestLog, in_lane
from polyreme_trainer.service.wire import ARRIVED, ENDED, UNLOADED, Request

_AGAIN, _GONE, _FULL = 409, 410, 429
_UNLOAD = "unload_model"
_TRIES = 100


async def submit(log: RequestLog, place: LogPlace, request: Request, about: dict[str, object], most: int) -> Response:
    """Adds a request to the log. The answer names it, with the fields `about`. Raises HTTPException when the log refuses it.

    Args:
        most: open requests of its tenant.
    """
    stamped = Request(request.op, {**request.fields, ARRIVED: time.time()}, request.body)
    became = await log.submit(place, stamped.pack(), most)
    if became == "early":
        raise HTTPException(_AGAIN, f"expected request {place.seq} after those before it; found none of them yet. Send it again.")
    if became == "full":
        raise HTTPException(_FULL, "expected room in the request log; found none. Send the request again later.")
    if became == "quota":
        raise HTTPException(_FULL, f"expected at most {most} waiting requests of a tenant; found {most}. Send it again later.")
    if became == "gone":
        raise HTTPException(_GONE, f"expected a new request; found {place.id}, which was executed and whose result has expired")
    return JSONResponse({"request_id": place.id, **about})


async def unload(log: RequestLog, model: str) -> LogPlace:
    """Unloads a model after its newest request. Raises HTTPException when that is never reached, since its client goes on."""
    for _ in range(_TRIES):
        place = in_lane(model, await log.submitted(model) + 1)
        became = await log.submit(place, Request(_UNLOAD, {}).pack())
        if became == "new":
            await log.set_record("model", model, {ENDED: UNLOADED})
            return place
        if became == "full":
            break
    raise HTTPException(_FULL, f"expected room for a request after those of {model}; found none. Send it again later.")
