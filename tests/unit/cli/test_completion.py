"""The completions that a shell gets."""

import pytest

from polyreme.cli.completion import config_keys
from polyreme.cli.main import typed_words


@pytest.mark.parametrize("variable", ["COMP_WORDS", "_TYPER_COMPLETE_ARGS"])
def test_the_command_that_is_typed_is_the_one_that_is_loaded(variable: str) -> None:
    shell = {"_POLYREME_COMPLETE": "complete_bash", variable: "polyreme up run.yaml --re"}
    assert typed_words([], shell) == ["up", "run.yaml", "--re"]
    assert typed_words(["status"], {variable: "polyreme up"}) == ["status"]


def test_keys_of_the_configuration() -> None:
    assert "trainer.optimizer.lr=" in config_keys("trainer.opt")
    assert config_keys("trainer.optimizer.lr") == ["trainer.optimizer.lr="]
    assert len(config_keys("")) == len(set(config_keys("")))
