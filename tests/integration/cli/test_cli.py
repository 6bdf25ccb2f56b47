"""The command line from a user's perspective: real processes, their messages and exit codes."""

import errno
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from polyreme import API_VERSION
from polyreme.config.load import load_config
from polyreme.process.lifecycle import exit_on_error
from support.commands import polyreme


def fails(result: "subprocess.CompletedProcess[str]", code: int, *pieces: str) -> None:
    """Asserts one error message, which may list several errors of the checks, no traceback, and the exit code."""
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1, result.stderr
    for piece in pieces:
        assert piece in result.stderr


def test_help_lists_all_commands_and_imports_none() -> None:
    result = polyreme("--help")
    assert result.returncode == 0
    for name in ("up", "audit", "config", "rollout", "reward", "train", "learner"):
        assert f" {name} " in result.stdout
    script = (
        "import sys\nfrom polyreme.cli.main import build_app\nfrom typer.testing import CliRunner\n"
        "CliRunner().invoke(build_app(['--help']), ['--help'])\n"
        "print([m for m in sys.modules if m.partition('.')[0] in ('redis', 'grpc', 'yaml', 'pydantic') or m.startswith('polyreme_')])"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"


def test_version() -> None:
    result = polyreme("--version")
    assert result.returncode == 0
    assert result.stdout == f"polyreme {version('polyreme')} (API {API_VERSION})\n"


def test_config_show_reads_back(config_file: Path, tmp_path: Path) -> None:
    result = polyreme("config", "show", str(config_file), "seed=7")
    shown = tmp_path / "shown.yaml"
    shown.write_text(result.stdout)
    assert result.returncode == 0
    assert load_config(shown) == load_config(config_file, ["seed=7"])


def test_config_check_and_a_dry_run_start_and_write_nothing(config_file: Path, tmp_path: Path) -> None:
    for command in (("config", "check"), ("up", "--dry-run")):
        result = polyreme(*command, str(config_file), "trainer.save_interval=5000")
        assert result.returncode == 0, result.stderr
        assert "iterations     1000" in result.stdout and "warning        trainer.save_interval" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_config_check_and_up_report_all_errors(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1="}\n')
    spoilt = (str(config_file), "reward.rewards=[{name: exact}, {name: exat}]", "data.prompt_key=question")
    for command in (("config", "check"), ("up",)):
        result = polyreme(*command, *spoilt)
        fails(result, 2, "2 errors")
        assert "'question'" in result.stderr and "exat" in result.stderr
    fails(polyreme("train", *spoilt), 2, "'question'")


def test_an_unknown_command_suggests_the_nearest() -> None:
    result = polyreme("rolout")
    assert result.returncode == 2
    assert "'rollout'" in result.stderr


def test_a_misspelt_key_suggests_the_nearest(config_file: Path) -> None:
    tree = yaml.safe_load(config_file.read_text())
    tree["trainer"]["optimizer"]["warmupp"] = 3
    config_file.write_text(yaml.safe_dump(tree))
    fails(polyreme("up", str(config_file)), 2, "trainer.optimizer.warmupp", "trainer.optimizer.warmup?")


def test_an_invalid_override_is_an_error(config_file: Path) -> None:
    fails(polyreme("up", str(config_file), "iterations=0"), 2, "iterations")


def test_a_missing_file_is_an_error(config_file: Path, tmp_path: Path) -> None:
    fails(polyreme("up", str(tmp_path / "nothing.yaml")), 2, "nothing.yaml")
    fails(polyreme("up", str(config_file), "model.path=nowhere"), 2, "model.path", "nowhere")
    beyond = str(tmp_path / "nothing.yaml" / "logs")
    (tmp_path / "nothing.yaml").touch()
    fails(polyreme("train", str(config_file), "--log-dir", beyond), 2, "--log-dir", beyond)
    fails(polyreme("doctor", "--directory", beyond), 2, "--directory", beyond)
    fails(polyreme("audit", str(tmp_path / "nothing.yaml")), 2, "a run directory", "found a file")


def test_samples_longer_than_the_context_are_an_error(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 48}')
    fails(polyreme("up", str(config_file)), 2, "rollout.max_model_len", "48", "64")


def test_an_unreachable_redis_is_an_error(config_file: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}"
        fails(polyreme("up", str(config_file), "--redis", url), 3, "Redis")


def test_a_redis_that_may_lose_writes_is_an_error(config_file: Path, tmp_path: Path) -> None:
    from polyreme.experience.embedded_redis import redis_binary
    from polyreme.net.ports import free_port

    port = free_port()
    server = subprocess.Popen(
        [redis_binary(), "--port", str(port), "--dir", str(tmp_path), "--save", ""],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        fails(polyreme("up", str(config_file), "--redis", f"redis://127.0.0.1:{port}"), 3, "appendonly")
    finally:
        server.terminate()
        server.wait(10)


def test_a_learner_on_several_machines_needs_an_external_redis(config_file: Path) -> None:
    spread = "trainer.parallel={data: 2, nodes: 2}"
    fails(polyreme("up", str(config_file), spread), 2, "trainer.parallel.nodes = 2", "--redis URL")


def test_an_existing_run_directory_is_not_reused(config_file: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "run"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text('{"run_id": "run-1", "redis": "embedded"}')
    (run_dir / "checkpoints" / "iteration-000000").mkdir(parents=True)
    fails(polyreme("up", str(config_file)), 2, "run-1", "--resume", "--fork")


def test_a_full_disk_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"), exit_on_error("polyreme"), open("/dev/full", "w", buffering=1) as full:
        full.write("more than fits\n")
    assert capsys.readouterr().err.startswith("polyreme: error: expected writable files; found [Errno 28] No space")


def test_a_file_without_rights_is_an_error_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied", "folder/model")
    with pytest.raises(SystemExit, match="1"), exit_on_error("polyreme"):
        raise refused
    assert capsys.readouterr().err.startswith("polyreme: error: expected access to folder/model; found Permission denied. ")
    with pytest.raises(PermissionError), exit_on_error("polyreme"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_audit_needs_a_run(tmp_path: Path) -> None:
    fails(polyreme("audit"), 2, "neither a run directory nor --redis")
    fails(polyreme("audit", str(tmp_path)), 2, "run.json")
