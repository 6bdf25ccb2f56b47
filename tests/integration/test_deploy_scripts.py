"""The scripts of deploy/ that run beside the services, with real processes."""

import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
POLYREME = """#!/bin/sh
case $1 in
reward)
    echo $$ >>"$RUNS/rewards"
    [ "$(wc -l <"$RUNS/rewards")" -gt 1 ] || exit 1
    exec sleep 1000
    ;;
train)
    until [ "$(wc -l <"$RUNS/rewards")" -gt 1 ]; do sleep 0.1; done
    ;;
esac
"""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_probe_stays_in_its_container_whatever_the_proxy() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [sys.executable, ROOT / "deploy" / "docker" / "healthy.py", f"http://127.0.0.1:{server.server_address[1]}/ready"]
        environment = {"http_proxy": "http://127.0.0.1:1", "HTTP_PROXY": "http://127.0.0.1:1"}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
        server.shutdown()
    assert done.returncode == 0, done.stderr


def test_machine_0_starts_its_reward_server_again_and_leaves_nothing(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "polyreme").write_text(POLYREME)
    (programs / "polyreme").chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    given = {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CONFIG": "run.yaml",
        "RUNS": str(tmp_path),
        "REDIS_PORT": str(port),
        "POLYREME_REDIS_PASSWORD": "a",
        "POLYREME_TOKEN": "b",
    }
    command = [ROOT / "deploy" / "machines" / "node.sh", "0", "2", "127.0.0.1"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    started = [int(pid) for pid in (tmp_path / "rewards").read_text().split()]
    assert len(started) == 2 and not any(psutil.pid_exists(pid) for pid in started)
