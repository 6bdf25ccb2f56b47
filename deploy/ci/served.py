"""Trains a model on a training service, as its client: `served.py ADDRESS`, with its key in TINKER_API_KEY.

The exit status is 0 when every step was taken, the loss has fallen to a half, the service has sampled from the trained weights, and an agent has
had a turn in a session.
"""

import os
import sys
from pathlib import Path

import httpx

from polyreme.config.load import load_config
from polyreme.rundir.input_files import read_model_files
from polyreme_trainer.data.template import Template
from polyreme_trainer.remote import RemoteService
from polyreme_trainer.stages.warm_start import read_examples, run_phase

DATA = "/polyreme/data"
PHASE = f"{{data: {DATA}/sft_short.jsonl, steps: 120, batch_size: 16, lr: 2.0e-3, warmup: 10}}"


def turn(address: str) -> dict[str, list[float]]:
    """What a session keeps of an agent's turn."""
    key, seconds = {"x-api-key": os.environ["TINKER_API_KEY"]}, 300.0
    with httpx.Client(base_url=f"{address}/api/v1", headers=key, timeout=seconds, trust_env=False) as client:
        opened = client.post("/agent_sessions", json={"max_tokens": 8}).raise_for_status().json()
        bearer = {"authorization": f"Bearer {opened['api_key']}"}
        asked = {"model": "any", "messages": [{"role": "user", "content": "1+2="}]}
        url = f"{opened['base_url']}/chat/completions"
        httpx.post(url, json=asked, headers=bearer, timeout=seconds, trust_env=False).raise_for_status()
        [trajectory] = client.get(f"/agent_sessions/{opened['agent_session_id']}").raise_for_status().json()["trajectories"]
    return trajectory


def main(address: str) -> None:
    overrides = [
        f"model.path={DATA}/model",
        f"data.train={DATA}/train.jsonl",
        f"data.eval={DATA}/eval.jsonl",
        f"trainer.sft=[{PHASE}]",
    ]
    config = load_config(Path("/opt/polyreme-examples/running_total/run.yaml"), overrides)
    files, [phase] = read_model_files(config.model.path), config.trainer.sft
    losses = []
    with RemoteService.open(config, address) as service:
        service.begin_phase(phase)
        for record in run_phase(service, phase, read_examples(phase.data, config, files), config.seed):
            print(f"step {record.step}: loss {record.loss:.3f}", flush=True)
            losses.append(record.loss)
        service.load(service.publish(1))
        prompts = Template(files, config.data).encode_prompts(["1+2="])
        [answer] = service.sample([prompt.tolist() for prompt in prompts], stop_ids=[], temperature=0.0)
    kept = turn(address)
    if len(losses) != 12 or losses[-1] > losses[0] / 2 or not answer.ids or not sum(kept["mask"]):
        sys.exit(f"losses {losses}, {len(answer.ids)} tokens sampled, kept of an agent's turn: {kept}")


if __name__ == "__main__":
    main(sys.argv[1])
