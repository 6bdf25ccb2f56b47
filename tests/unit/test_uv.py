"""uv is given pip's settings, because it reads none of them itself."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "requirements" / "uv.py"
spec = importlib.util.spec_from_file_location("requirements_uv", SCRIPT)
assert spec is not None and spec.loader is not None
uv = importlib.util.module_from_spec(spec)
spec.loader.exec_module(uv)

LISTING = """\
:env:.cert='/ca.pem'
global.cert='/other.pem'
global.extra-index-url='file:///first/simple file:///second/simple'
global.find-links='/wheels /more'
global.index-url='file:///default/simple'
install.index-url='file:///install/simple'
"""


def test_each_setting_of_pip_is_a_variable_of_uv() -> None:
    found = uv.environment(uv.parse(LISTING), {})
    assert found == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "file:///install/simple",  # the most specific section counts
        "UV_INDEX": "file:///first/simple file:///second/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.pem",
    }


def test_variables_of_the_caller_are_kept() -> None:
    given = {"UV_DEFAULT_INDEX": "file:///mine/simple", "PATH": "/bin"}
    found = uv.environment(uv.parse(LISTING), given)
    assert (found["UV_DEFAULT_INDEX"], found["PATH"]) == ("file:///mine/simple", "/bin")
    assert given == {"UV_DEFAULT_INDEX": "file:///mine/simple", "PATH": "/bin"}


def test_without_settings_only_the_strategy_is_passed() -> None:
    assert uv.environment(uv.parse(""), {}) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
