"""Servers of NeMo Gym that answer as real ones did, for machines that cannot install the package.

A recording has a row, what its agent asked the model and was told, and its answer to /run.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

FILE = Path(__file__).resolve().parents[1] / "contract" / "recordings" / "nemo_gym.json"


def install(folder: Path) -> Path:
    """A folder that stands for the virtual environment with the package: its Python is such a server, whatever it is told to run."""
    for kind in ("resources_servers", "responses_api_agents"):
        program = folder / "lib" / "python3.13" / "site-packages" / kind / "recorded" / "app.py"
        program.parent.mkdir(parents=True)
        program.touch()
    site = folder / "lib" / "python3.13" / "site-packages"
    (site / "nemo_gym").mkdir()
    rows = [recording["row"] for recording in json.loads(FILE.read_text()).values()]
    (site / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"type": "train", "jsonl_fpath": "none.jsonl"}, {"type": "example", "jsonl_fpath": "rows.jsonl"}]
    server = {"resources_servers": {"recorded": {"entrypoint": "app.py"}}}
    agent = {"responses_api_agents": {"recorded": {"entrypoint": "app.py", "datasets": data}}}
    (site / "recorded.yaml").write_text(yaml.safe_dump({"server": server, "agent": agent}))
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    python.chmod(0o755)
    return folder


async def run(request: Request) -> Response:
    """What /run answers. Its session is a cookie, and one that has been played has no game any more."""
    if request.cookies:
        return JSONResponse("Hit an exception: KeyError", 500)
    row = await request.json()
    rollout = row.pop("_ng_rollout_id")
    recording = next(each for each in json.loads(FILE.read_text()).values() if each["row"] == row)
    model = _told()["policy_model"]["responses_api_models"]["polyreme"]
    url = f"http://{model['host']}:{model['port']}/ng-rollout/{rollout}/v1/responses"
    given: list[Any] = recording["requests"][0]["input"]
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        for number, asked in enumerate(recording["requests"]):
            reply = await http.post(url, json={**asked, "input": given})
            if reply.status_code != 200:
                return JSONResponse(f"Hit an exception: {reply.text}", 500)
            given = [*given, *_continued(recording, number, reply.json()["output"])]
    answer = JSONResponse(recording["run"])
    answer.set_cookie("session", rollout)
    return answer


def _continued(recording: dict[str, Any], number: int, output: list[Any]) -> list[Any]:
    """What the agent adds to its input after a reply: its output, and what came behind it, for the calls of this reply."""
    told = recording["replies"][number]["output"]
    known = {old["call_id"]: new["call_id"] for old, new in zip(told, output, strict=True) if "call_id" in old}
    later = recording["requests"][number + 1]["input"] if number + 1 < len(recording["requests"]) else []
    behind = later[len(recording["requests"][number]["input"]) + len(told) :]
    return [*output, *({**item, "call_id": known[item["call_id"]]} if "call_id" in item else item for item in behind)]


def _told() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(os.environ["NEMO_GYM_CONFIG_DICT"])
    return told


async def _is_there(request: Request) -> Response:
    return JSONResponse({})


if __name__ == "__main__":
    (section,) = _told()[os.environ["NEMO_GYM_CONFIG_PATH"]].values()
    (settings,) = section.values()
    app = Starlette(routes=[Route("/openapi.json", _is_there), Route("/run", run, methods=["POST"])])
    asyncio.run(uvicorn.Server(uvicorn.Config(app, host=settings["host"], port=settings["port"], log_level="warning")).serve())
