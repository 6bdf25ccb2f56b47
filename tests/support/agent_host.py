"""A program that runs agents: POST {"task", "base_url", "api_key"} runs the function `run` of the module `client` of the task.

    PYTHON agent_host.py FOLDER      where the modules lie; prints its port

It runs with the packages of another lock, so it imports nothing of this repository.
"""

import asyncio
import importlib
import inspect
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            status, reply = 200, json.dumps(run(asked))
        except Exception as error:  # noqa: BLE001 the caller is told
            status, reply = 500, f"{type(error).__name__}: {error}"
        self.send_response(status)
        self.end_headers()
        self.wfile.write(reply.encode())


def run(asked: dict[str, Any]) -> Any:
    result = importlib.import_module(asked["task"]["client"]).run(asked["task"], asked["base_url"], asked["api_key"])
    return asyncio.run(result) if inspect.iscoroutine(result) else result


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
