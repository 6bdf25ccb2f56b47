"""An env server of verifiers that answers as a real one did, for machines that cannot install the package: `python FILE ... ADDRESS WORKERS`.

A recording has runs: what their agent asked the model, and the frames that came of it.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgpack
import zmq
import zmq.asyncio

FILE = Path(__file__).resolve().parents[1] / "contract" / "recordings" / "verifiers.json"


def install(folder: Path) -> Path:
    """A folder that stands for the virtual environment with the package: its Python is this server, whatever it is told to run."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    python.chmod(0o755)
    return folder


async def _ask(asked: dict[str, Any], conversation: list[dict[str, Any]]) -> str:
    """Has the conversation with the model: each answer follows the messages up to it. Returns what went wrong, or ''."""
    messages: list[dict[str, Any]] = []
    client = asked["client"]
    async with httpx.AsyncClient(headers=client["headers"], timeout=60, trust_env=False) as http:
        for message in conversation:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            body = {"model": asked["model"], "messages": messages}
            reply = await http.post(f"{client['base_url']}/chat/completions", json=body)
            if reply.status_code != 200:
                return reply.text
            messages.append(reply.json()["choices"][0]["message"])
    return ""


class RecordedEnvServer:
    """The server at a ZMQ address. A real one keeps each client that it is told of for ever, so this one takes no second one."""

    def __init__(self, address: str) -> None:
        self._recording = json.loads(FILE.read_text())
        self._socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        self._socket.bind(address)
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._client: dict[str, Any] | None = None

    async def serve(self) -> None:
        """Answers for ever."""
        while True:
            peer, name, method, payload = await self._socket.recv_multipart()
            body = msgpack.unpackb(payload)
            if method == b"health":
                await self._send(peer, name, b"reply", {"success": True, "error": None})
            elif method == b"cancel":
                run = self._runs.get(body["request_id"])
                print("asked to cancel a run", flush=True)
                if run is not None:
                    run.cancel()
                await self._send(peer, name, b"reply", {"cancelled": run is not None})
            else:
                self._runs[name.decode()] = asyncio.create_task(self._run(peer, name, body))

    async def _run(self, peer: bytes, name: bytes, body: dict[str, Any]) -> None:
        won, refused, invalid = (self._recording[each] for each in ("won", "refused", "invalid"))
        self._client = self._client or body["client"]
        frames: list[Any]
        if body["client"] != self._client:
            frames = [["reply", {"success": False, "error": f"a second client: {body['client']}"}]]
        elif not body["client"].get("timeout", {}).get("connect"):
            frames = [["reply", {"success": False, "error": "a connection may take 30 s"}]]
        elif body["task_data"] != won["task"]:
            frames = invalid["frames"]
        else:
            frames = refused["frames"] if await _ask(body, won["conversation"]) else won["frames"]
        for kind, frame in frames:
            await self._send(peer, name, kind.encode(), frame)

    async def _send(self, peer: bytes, name: bytes, kind: bytes, message: dict[str, Any]) -> None:
        await self._socket.send_multipart([peer, name, kind, msgpack.packb(message)])


if __name__ == "__main__":
    asyncio.run(RecordedEnvServer(sys.argv[-2]).serve())
