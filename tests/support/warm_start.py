"""A program for the ranks of test_warm_start: a warm start on synthetic rows that may be asked to drain. All ranks run it."""

from pathlib import Path

from polyreme.experience.metric_records import MetricRecord, WarmStartSaved, WarmStartStep
from polyreme_trainer.stages.warm_start import warm_start
from support.learning import Rank, start
from support.tiny_tokenizer import model_files


def warm_up(config_json: str, reports: str, out: str) -> None:
    """Continues from the saved state, and is asked to drain at report number `reports`. Writes the weights and the reports."""
    config, device = start(config_json)
    rank, steps, saves = Rank(config, device), [], []
    files = model_files() | {"config.json": Path(config.model.path, "config.json").read_bytes()}

    def report(record: MetricRecord) -> bool:
        match record:
            case WarmStartSaved(step=step):
                saves.append(step)
                return False
            case WarmStartStep(phase=phase, step=step):
                steps.append((phase, step))
        return len(steps) >= int(reports)

    complete = warm_start(rank.engine, config, files, rank.ranks, report)
    rank.write(Path(out), {"complete": complete, "steps": steps, "saves": saves})
    rank.engine.close()
