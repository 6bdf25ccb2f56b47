"""What `polyreme up` warns about before it starts."""

from pathlib import Path

import pytest

from polyreme.cli.commands.up import open_ports
from polyreme.config.security import SecurityConfig
from support.configs import run_config


@pytest.mark.parametrize(
    ("security", "others", "warned"),
    [
        (None, [1001], True),
        (None, [], False),
        (SecurityConfig(token_env="TOKEN"), [1001, 1002], False),
        (SecurityConfig(certificate=Path("a"), key=Path("b")), [1001], True),
        (SecurityConfig(certificate=Path("a"), key=Path("b"), ca=Path("c"), mutual=True), [1001], False),
    ],
)
def test_ports_without_a_token_on_a_shared_machine(
    tmp_path: Path, security: SecurityConfig | None, others: list[int], warned: bool
) -> None:
    config = run_config(tmp_path).model_copy(update={"security": security})
    assert ("security.token_env" in open_ports(config, others)) == warned
