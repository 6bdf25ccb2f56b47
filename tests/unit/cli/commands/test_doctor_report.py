"""The file of `polyreme doctor --report`: it has what explains a failure, and no secret."""

from pathlib import Path

from polyreme.cli.commands.doctor import LINES_OF_A_LOG, report_text

SECRETS = ("correct-horse", "redis-password", "T000/B000/hook", "user:pass")


def run_with_secrets(folder: Path) -> Path:
    """A run directory whose files contain every secret."""
    logs = folder / "logs" / "attempt_2"
    logs.mkdir(parents=True)
    (folder / "logs" / "attempt_1").mkdir()
    (folder / "redis").mkdir()
    (folder / "redis" / "password").write_text("redis-password\n")
    (folder / "config.yaml").write_text("name: letters\nnotices: [{url: 'https://hooks.example/T000/B000/hook'}]\n")
    noise = "".join(f"line {number}\n" for number in range(LINES_OF_A_LOG))
    (logs / "train.log").write_text(
        f"the first line\n{noise}redis://user:pass@127.0.0.1:6379/0 with redis-password\nerror: no room; token correct-horse\n"
    )
    return folder


def test_what_explains_a_failure_is_in_the_report(tmp_path: Path) -> None:
    text = report_text(["missing  /dev/shm"], run_with_secrets(tmp_path), {"POLYREME_TOKEN": "correct-horse"})
    for part in (
        "Python 3",
        "missing  /dev/shm",
        "name: letters",
        "== the last lines of train",
        "error: no room",
        "POLYREME_TOKEN",
    ):
        assert part in text
    assert "polyreme " in text and "numpy " in text
    assert "the first line" not in text


def test_no_secret_is_in_the_report(tmp_path: Path) -> None:
    text = report_text([], run_with_secrets(tmp_path), {"POLYREME_TOKEN": "correct-horse", "PATH": "/bin"})
    assert not [secret for secret in SECRETS if secret in text]
    assert "https://hooks.example/(removed)" in text and "redis://127.0.0.1:6379/(removed)" in text


def test_a_setting_of_tokenizers_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("resume: false\n")
    assert "resume: false" in report_text([], tmp_path, {"TOKENIZERS_PARALLELISM": "false"})
