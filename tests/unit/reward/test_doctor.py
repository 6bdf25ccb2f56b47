"""The reward service's verdict from the working modes of isolation."""

import pytest

from polyreme.isolation.sandbox.program import Mode
from polyreme_reward.doctor import sandbox_verdict


@pytest.mark.parametrize(
    ("bubblewrap", "landlock", "level", "mode"),
    [(None, None, "ok", Mode.BUBBLEWRAP), ("refused", None, "ok", Mode.LANDLOCK), ("refused", "no kernel support", "note", None)],
)
def test_the_first_mode_that_works_is_reported(
    bubblewrap: str | None, landlock: str | None, level: str, mode: Mode | None
) -> None:
    verdict = sandbox_verdict({Mode.BUBBLEWRAP: bubblewrap, Mode.LANDLOCK: landlock})
    assert verdict.level == level
    assert verdict.found.startswith(str(mode)) if mode else "refused" in verdict.found
