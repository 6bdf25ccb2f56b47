"""The training service compared with its own engines without a service, and with a public server. Two cores.

    python bench/serve.py [--rounds 5] [--peer PYTHON]

One service with vLLM, a client with the public SDK, the learner's engine and vLLM in processes of their own, which take turns; each figure is
the median over rounds of the ratio within a round. The model has 3 million random weights and adapters of rank 8; a batch has 1,024 tokens.

service_vs_engine        steps per second of a client's loop over those of the same calls on the engine in process (>= 0.85)
adapters_8_vs_1          time of eight tenants' steps over that of one tenant's eight, with batches of 64 tokens (<= 1.6)
sample_vs_engine         time of vLLM for 64 answers of 32 tokens with an adapter over that of the same requests through the service (>= 0.9)
sample_vs_base           the same with the time of vLLM without an adapter
snapshot_to_first_token  seconds from an optimizer step to the first token that is sampled with its weights
snapshot_vs_push         the same over the time to write and load all weights into vLLM and sample a token
vs_peer                  steps per second over those of skyrl-tx with the same loop, with --peer (>= 2)

--peer names the interpreter of an environment with skyrl-tx 0.3.0 (jax on CPU), as `measure_peer` says. No other public server was tried.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from polyreme.process.machine import thread_environment

SIDE = Path(__file__).parent / "serve_side"
LEAST = {"service_vs_engine": 0.85, "sample_vs_engine": 0.9, "vs_peer": 2.0}
MOST = {"adapters_8_vs_1": 1.6}
STEPS: dict[str, Any] = {"batch": 16, "length": 64, "steps": 5}
SMALL: dict[str, Any] = {"batch": 4, "length": 16}
SAMPLES: dict[str, Any] = {"prompts": 16, "length": 32, "samples": 4}
ANSWER = 32
TURNS = 3
"""Turns of a round in which both sides take steps, or sample."""
DEADLINE = 600.0
THREADS = thread_environment(1)
"""As the service's processes have them; the learner's engine sets the number of its own."""


def save_model(folder: Path) -> None:
    """Saves a Qwen3 with random weights, and a tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from polyreme.hub.tiny_model import write_tiny_model

    write_tiny_model(folder)  # its tokenizer
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = Qwen3Config(**sizes, **heads, **ids, tie_word_embeddings=True, max_position_embeddings=256)
    Qwen3ForCausalLM(config).save_pretrained(folder)


class Part:
    """A process that executes orders."""

    def __init__(self, stack: ExitStack, python: str, script: str, *arguments: str) -> None:
        command = [python, "-W", "ignore", "-m", f"serve_side.{script}", *arguments]
        environment = {**os.environ, **THREADS, "PYTHONPATH": f"{SIDE.parent}:{os.environ.get('PYTHONPATH', '')}"}
        self._process = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(self._end)

    def ask(self, **order: object) -> float:
        """The answer to an order."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line[:1].isdigit():  # a library may print something else
                return float(line)
        raise RuntimeError(f"{self._process.args!r}: exit code {self._process.wait()}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def server(command: Sequence[str], url: str, log: Path, **environment: str) -> Iterator[str]:
    """Runs an API server until the block ends. Yields its address once it answers."""
    with open(log, "wb") as text:
        process = subprocess.Popen(command, stdout=text, stderr=text, env={**os.environ, **environment})
    deadline = time.monotonic() + DEADLINE
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(log.read_text()[-3000:]) from None
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def free_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def newest_adapter(folder: Path) -> str:
    """The directory of the snapshot that was written last."""
    return str(max(folder.rglob("adapter_model.safetensors"), key=lambda path: path.stat().st_mtime).parent)


def sample(client: Part, bare: Part, folder: Path) -> tuple[float, float, float]:
    """Seconds for the same answers through the service, from vLLM with the same adapter, and from vLLM without one."""
    answers = client.ask(case="sample", **SAMPLES, answer=ANSWER)
    adapter = bare.ask(case="sample", **SAMPLES, answer_tokens=ANSWER, adapter=newest_adapter(folder))
    return answers, adapter, bare.ask(case="sample", **SAMPLES, answer_tokens=ANSWER)


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """The figures of the service."""
    url, model = free_url(), folder / "model"
    sampler = {"engine": "vllm", "max_model_len": 128, "max_num_seqs": 64}
    tree = {"output_dir": str(folder), "base_model": "bench", "port": int(url.rpartition(":")[2]), "sampler": sampler}
    file = folder / "serve.yaml"
    file.write_text(json.dumps({**tree, "model": {"path": str(model)}}))
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        stack.enter_context(server([sys.executable, "-m", "polyreme", "serve", str(file)], url, folder / "serve.log"))
        client = Part(stack, sys.executable, "client", url, "bench")
        resolved = str(folder / "serve" / "config.yaml")
        engine, bare = (Part(stack, sys.executable, script, resolved) for script in ("engine", "sampler"))
        eight: dict[str, Any] = {"case": "steps", **SMALL, "tenants": 8}
        client.ask(**eight | {"steps": 2})
        for number in range(rounds + 1):
            stepped = [(client.ask(case="steps", **STEPS), engine.ask(**STEPS)) for _ in range(TURNS)]
            tenants, alone = client.ask(**eight, steps=4), client.ask(case="steps", **SMALL, steps=32)
            sampled = [sample(client, bare, folder) for _ in range(TURNS)]
            snapshot, push = client.ask(case="snapshot", length=16), bare.ask(case="push", length=16)
            figures = {
                "service_vs_engine": statistics.median(direct / served for served, direct in stepped),
                "adapters_8_vs_1": tenants / alone,
                "sample_vs_engine": statistics.median(adapter / answers for answers, adapter, _ in sampled),
                "sample_vs_base": statistics.median(base / answers for answers, _, base in sampled),
                "snapshot_to_first_token": snapshot,
                "snapshot_vs_push": snapshot / push,
                "steps_per_second": STEPS["steps"] / statistics.median(served for served, _ in stepped),
            }
            print(f"round {number}: " + ", ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)
            for name, value in figures.items() if number else ():  # the first one warms up
                found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def measure_peer(folder: Path, python: str, rounds: int) -> float:
    """Steps per second of skyrl-tx with the same loop, once it has compiled.

    Its environment: `uv pip install 'skyrl-tx[tinker]==0.3.0' 'jax>=0.8,<1' flax optax 'tinker<0.12'`, without its extra `jax`, which is CUDA's.
    """
    url, model, launcher = free_url(), str(folder / "model"), folder / "bin" / "uv"
    settings = folder / "model" / "config.json"
    given = json.loads(
        settings.read_text()
    )  # as transformers 5 writes it; that environment has 4, which has the base of the rotation here
    settings.write_text(json.dumps({**given, "rope_theta": given["rope_parameters"]["rope_theta"]}))
    launcher.parent.mkdir()
    # The server starts its engine by `uv run --extra tinker --extra jax -m MODULE`, which would install that extra.
    launcher.write_text(f'#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\nexec {python} "$@"\n')
    launcher.chmod(0o700)
    options = ["--base-model", model, "--port", url.rpartition(":")[2], "--host", "127.0.0.1"]
    options += ["--database-url", f"sqlite:///{folder}/peer.db", "--checkpoints-base", str(folder / "peer")]
    options += ["--backend-config", json.dumps({"max_lora_adapters": 2, "max_lora_rank": 8})]
    path = f"{launcher.parent}:{os.environ['PATH']}"
    with ExitStack() as stack:
        command = [python, "-m", "tx.tinker.api", *options]
        stack.enter_context(server(command, url, folder / "peer.log", JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", PATH=path))
        client = Part(stack, python, "client", url, model)
        client.ask(case="steps", **STEPS)
        return STEPS["steps"] / statistics.median(client.ask(case="steps", **STEPS) for _ in range(rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", help="interpreter of an environment with skyrl-tx")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ps") as name:
        folder = Path(name)
        save_model(folder / "model")
        measured = measure(folder, arguments.rounds)
        if arguments.peer:
            peer = measure_peer(folder, arguments.peer, arguments.rounds)
            print(f"skyrl-tx: {peer:.3f} steps per second of the same loop", flush=True)
            measured["vs_peer"] = measured["steps_per_second"] / peer
    measured = {name: round(value, 3) for name, value in measured.items()}
    met = all(measured[name] >= least for name, least in LEAST.items() if name in measured)
    met = met and all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "serve", "measured": measured, "target": {**LEAST, **MOST}, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
