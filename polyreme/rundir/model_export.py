"""A Hugging Face directory as the export of a run or a stage."""

from collections.abc import Mapping
from pathlib import Path

from polyreme.config.load import load_any
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError


def export_config(model_dir: Path) -> RunConfig | StageConfig | None:
    """The configuration of the run or stage whose export RUN_DIR/hf/NAME a directory is; None for any other directory."""
    run_dir = model_dir.resolve().parent.parent
    is_export = model_dir.resolve().parent.name == "hf" and (run_dir / "config.yaml").is_file()
    return load_any(run_dir / "config.yaml") if is_export else None


def is_classifier(fields: Mapping[str, object]) -> bool:
    """Whether the fields of a config.json are those of a sequence classifier, such as a reward model."""
    names = fields.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def no_policy(model_dir: Path) -> ConfigError:
    """The error of a conversation with a reward model."""
    return ConfigError(
        f"a model that writes text in {model_dir}",
        "a reward model, which only scores text",
        f"Score answers with it: `reward: {{rewards: [{{model: {model_dir}}}]}}` in a YAML file F, then `polyreme reward test"
        " ROWS --config F`; or train a policy with this reward.",
    )
