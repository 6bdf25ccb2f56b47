"""Trains a model on a training service, as its client: `served.py ADDRESS`, with its key in TINKER_API_KEY.

The exit status is 0 when every step was taken, the loss has fallen to a half, and the service has sampled from the trained weights.
"""

import sys
from pathlib import Path

from polyreme.config.load import load_config
from polyreme.rundir.input_files import read_model_files
from polyreme_trainer.data.template import Template
from polyreme_trainer.remote import RemoteService
from polyreme_trainer.stages.warm_start import read_examples, run_phase

DATA = "/polyreme/data"
PHASE = f"{{data: {DATA}/sft_short.jsonl, steps: 120, batch_size: 16, lr: 2.0e-3, warmup: 10}}"


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
    if len(losses) != 12 or losses[-1] > losses[0] / 2 or not answer.ids:
        sys.exit(f"losses {losses}, {len(answer.ids)} tokens sampled")


if __name__ == "__main__":
    main(sys.argv[1])
