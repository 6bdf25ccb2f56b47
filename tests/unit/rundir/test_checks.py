"""The checks of `polyreme config check` and `polyreme up --dry-run`, before anything starts."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from polyreme.config.load import load_config
from polyreme.errors import AbsentError, ConfigError, DataError, PolyremeError
from polyreme.process.machine import has_device
from polyreme.rundir.checks import GROUP, Findings, SeveralErrors, check_run, findings
from polyreme_trainer.checks import check_device

REWARD = """
import torch_is_not_imported_by_a_check
print("nor is anything run")
LIMIT = 3
def helper(x): return x
def reward(response, label, bonus=1.0): return 0.0
"""


def found(config_file: Path, *overrides: str) -> Findings:
    return findings(load_config(config_file, overrides))


def errors(config_file: Path, *overrides: str) -> str:
    result = found(config_file, *overrides)
    assert result.errors and all(isinstance(error, ConfigError | DataError) for error in result.errors)
    return "\n".join(map(str, result.errors))


def rows(config_file: Path, *rows: object) -> None:
    (config_file.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sound_run_passes_without_a_word_and_without_torch(config_file: Path) -> None:
    assert found(config_file) == Findings((), ())
    assert check_run(load_config(config_file)) == ()
    script = (
        "import sys\nfrom pathlib import Path\nfrom polyreme.rundir.checks import check_run\nfrom polyreme.config.load import load_config\n"
        f"check_run(load_config(Path({str(config_file)!r})))\nsys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", script]) == 0


def test_every_error_is_reported_at_once(config_file: Path) -> None:
    rows(config_file, {"question": "1+1="})
    edit(config_file.parent / "model" / "config.json", model_type="mamba")
    text = errors(config_file, "reward.rewards=[{name: exat}]")
    for piece in ("mamba", "'prompt' in", "Did you mean exact?"):
        assert piece in text
    with pytest.raises(PolyremeError):
        check_run(load_config(config_file))


def test_what_is_missing_leaves_the_other_checks(config_file: Path) -> None:
    """Each missing file is named once, and what can be checked without it is."""
    rows(config_file, {"question": "1+1="})
    (config_file.parent / "model" / "tokenizer.json").unlink()
    (config_file.parent / "model" / "model.safetensors").unlink()
    edit(config_file.parent / "model" / "config.json", model_type="mamba")
    overrides = (
        "data.eval=nowhere.jsonl",
        "reward.rewards=[{name: exat}]",
        "trainer.sft=[{data: no_rows.jsonl, steps: 1, batch_size: 1, lr: 1.0e-3}]",
        "rollout.max_model_len=5000",
    )
    result = found(config_file, *overrides)
    text = "\n".join(map(str, result.errors))
    for piece in (
        "tokenizer.json",
        "nowhere.jsonl",
        "no_rows.jsonl",
        "within the model's context",
        "mamba",
        "'prompt' in",
        "exact?",
    ):
        assert text.count(piece) == 1, (piece, text)
    with pytest.raises(SeveralErrors) as raised:
        check_run(load_config(config_file, overrides))
    assert list(map(str, raised.value.errors)) == list(map(str, result.errors)) and raised.value.exit_code == 2


def test_a_missing_model_is_one_error_with_a_hint_that_fits(config_file: Path) -> None:
    rows(config_file, {"question": "1+1=", "answer": "2"})
    shutil.rmtree(config_file.parent / "model")
    model, data = found(config_file).errors
    assert "no such directory" in str(model) and "polyreme init" in model.do and "prepare" not in model.do
    assert "'prompt' in" in str(data)
    (config_file.parent / "prepare.py").touch()
    assert str(config_file.parent / "prepare.py") in found(config_file).errors[0].do


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_a_device_that_this_machine_lacks_is_an_error(config_file: Path, kind: str) -> None:
    [error] = check_device(kind, lambda asked: asked != kind)
    assert isinstance(error, AbsentError) and f"device: {kind}" in error.expected
    assert not [*check_device(kind, lambda asked: asked == kind)]
    expected = [] if has_device(kind) else [str(error)]
    assert [str(each) for each in found(config_file, f"device={kind}").errors] == expected


def test_rows_without_the_label_that_a_reward_needs(config_file: Path) -> None:
    rows(config_file, *({"prompt": "1+1=", "answer": ""} for _ in range(700)))
    assert "0 of 700 rows" in errors(config_file)
    rows(config_file, {"prompt": "1="}, {"prompt": "1=", "answer": 2})
    [notice] = found(config_file).notices
    assert "1 of 2 rows" in notice
    rows(config_file, {"prompt": "1="})
    assert found(config_file, "reward.rewards=[{name: length, options: {most: 3}}]").notices == ()


def test_rewards_that_rows_name(config_file: Path) -> None:
    several = ["reward.rewards=[{name: exact}, {name: code}]", "reward.choose_by=by"]
    rows(config_file, {"prompt": "1=", "answer": "1", "by": "exact"}, {"prompt": "1=", "by": ["code"], "tests": ["assert 1"]})
    assert found(config_file, *several) == Findings((), ())
    rows(config_file, {"prompt": "1=", "answer": "1", "by": "exact"}, {"prompt": "1=", "by": "code"})
    assert "0 of 1 rows" in errors(config_file, *several) and "tests or answer" in errors(config_file, *several)
    rows(config_file, {"prompt": "1=", "answer": "1", "by": "exakt"})
    assert "train.jsonl:1" in errors(config_file, *several)


@pytest.mark.parametrize(
    ("spec", "piece"),
    [
        ("{file: nowhere.py}", "nowhere.py"),
        ("{file: reward.py, function: rewrad}", "a function rewrad"),
        ("{file: reward.py, function: helper}", "['x']"),
        ("{file: reward.py, options: {bonos: 2}}", "bonos"),
        ("{file: broken.py}", "line 1"),
        ("{file: two.py}", "['a', 'b']"),
        ("{module: no_such_module.rewards}", "no_such_module.rewards"),
        ("{name: exact, options: {after: 3}}", "after"),
        ("{model: nowhere}", "config.json"),
        ("{url: 'ftp://h/', protocol: native}", "ftp://h/"),
        ("{url: 'https://h/', protocol: native, security: {token_env: NO_SUCH_TOKEN}}", "NO_SUCH_TOKEN"),
    ],
)
def test_a_reward_that_could_not_be_loaded(config_file: Path, monkeypatch: pytest.MonkeyPatch, spec: str, piece: str) -> None:
    monkeypatch.chdir(config_file.parent)
    for name, code in {"reward": REWARD, "broken": "def reward(:", "two": "def a(response): ...\ndef b(response): ..."}.items():
        Path(f"{name}.py").write_text(code)
    assert piece in errors(config_file, f"reward.rewards=[{spec}]")


def test_a_reward_of_the_users_is_read_and_not_run(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(config_file.parent)
    Path("reward.py").write_text(REWARD)
    own = "reward.rewards=[{file: reward.py, options: {bonus: 2}}]"
    assert found(config_file, own) == Findings((), ())
    rows(config_file, {"prompt": "1="})
    assert "0 of 1 rows" in errors(config_file, own)


@pytest.mark.parametrize("section", ["security", "reward.security"])
def test_files_and_tokens_of_the_services_security(config_file: Path, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    monkeypatch.delenv("TOKEN_OF_THE_TEST", raising=False)
    assert "TOKEN_OF_THE_TEST" in errors(config_file, f"{section}.token_env=TOKEN_OF_THE_TEST")
    monkeypatch.setenv("TOKEN_OF_THE_TEST", "t")
    assert found(config_file, f"{section}.token_env=TOKEN_OF_THE_TEST") == Findings((), ())
    assert "nowhere.pem" in errors(config_file, f"{section}={{certificate: nowhere.pem, key: nowhere.pem}}")


def test_a_tokenizer_larger_than_the_embeddings(config_file: Path) -> None:
    edit(config_file.parent / "model" / "config.json", vocab_size=47)
    text = errors(config_file)
    assert "47" in text and "48" in text


def test_a_closing_token_that_stops_no_rollout(config_file: Path) -> None:
    template = config_file.parent / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<eos>", "<pad>"))
    [notice] = found(config_file).notices
    assert "<pad>" in notice and "<eos>" in notice
    edit(config_file.parent / "model" / "generation_config.json", eos_token_id=[0, 1])
    assert found(config_file).notices == ()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff\xfe"])
def test_a_damaged_model_file(config_file: Path, name: str, content: bytes) -> None:
    (config_file.parent / "model" / name).write_bytes(content)
    errors(config_file)


@pytest.mark.parametrize(
    "section",
    ["trainer.sft=[{{data: {}, steps: 1, batch_size: 1, lr: 1.0e-3}}]", "algorithm.ptx={{data: {}, coef: 0.1, batch_size: 1}}"],
    ids=["warm start", "mixed in"],
)
def test_supervised_rows_are_checked(config_file: Path, section: str) -> None:
    rows = config_file.parent / "sft.jsonl"
    setting = section.format(rows)
    assert str(rows) in errors(config_file, setting)
    rows.write_text('{"prompt": "1+1="}\n')
    assert "'response' in" in errors(config_file, setting)
    rows.write_text('{"prompt": "1+1=", "response": "2"}\n')
    assert found(config_file, setting) == Findings((), ())


def test_prompts_that_are_too_long(config_file: Path) -> None:
    rows(config_file, {"prompt": "1" * 40, "answer": 1}, {"prompt": "1", "answer": 1})
    [notice] = found(config_file).notices
    assert "1 of 2 prompts" in notice
    rows(config_file, {"prompt": "1" * 40, "answer": 1})
    assert "1, all longer" in errors(config_file)


@pytest.mark.parametrize(
    ("rewards", "best", "refused"),
    [
        ("[{name: exact}]", "hard/pass@2", False),
        ("[{name: exact, weight: 2}]", "hard/pass@2", True),
        ("[{name: exact}, {name: length}]", "hard/pass@2", True),
        ("[{name: length}]", "hard/pass@2", True),
        ("[{name: length}]", "hard/best@2", False),
        ("[{name: exact}, {name: length}]", "hard/reward/length", False),
    ],
)
def test_a_deciding_metric_that_the_rewards_cannot_give(config_file: Path, rewards: str, best: str, refused: bool) -> None:
    sets = f"eval_sets=[{{name: hard, data: {config_file.parent / 'train.jsonl'}, answers: 2}}]"
    result = found(config_file, sets, f"eval_best={best}", f"reward.rewards={rewards}")
    assert len(result.errors) == refused
    for error in result.errors:
        assert isinstance(error, ConfigError)
        assert "hard/best@2" in error.expected and "pass@" not in error.expected and best in error.found


def test_a_deciding_reward_that_no_row_of_the_set_names(config_file: Path) -> None:
    rows(config_file, {"prompt": "1+1=", "answer": "2", "kind": "exact"})
    chosen = ("reward.rewards=[{name: exact}, {name: length}]", "reward.choose_by=kind")
    sets = f"eval_sets=[{{name: hard, data: {config_file.parent / 'train.jsonl'}}}]"
    assert not found(config_file, *chosen, sets, "eval_best=hard/reward/exact").errors
    [error] = found(config_file, *chosen, sets, "eval_best=hard/reward/length").errors
    assert isinstance(error, ConfigError) and "hard/mean, hard/reward/exact" in error.expected and "kind" in error.found


def test_the_rows_of_each_held_out_set_are_checked(config_file: Path) -> None:
    (config_file.parent / "hard.jsonl").write_text('{"question": "1+1="}\n')
    text = errors(config_file, f"eval_sets=[{{name: hard, data: {config_file.parent / 'hard.jsonl'}}}]")
    assert "'prompt' in" in text and "hard.jsonl" in text


def test_what_another_service_lacks_here_is_a_notice(config_file: Path) -> None:
    """Its files may be on the service's own machine."""
    config = load_config(config_file, ["reward.rewards=[{file: elsewhere.py}]"])
    assert findings(config).errors
    [notice] = check_run(config, only="trainer")
    assert "reward" in notice and "elsewhere.py" in notice
    with pytest.raises(ConfigError):
        check_run(config, only="reward")


OTHER_CHECK = """
from polyreme.errors import ConfigError, DataError

def check(config):
    yield "a notice"
    yield ConfigError("a", "b", "c")
    raise DataError("d", "e", "f")
"""


def test_a_check_may_raise_or_yield(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an installed package."""
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info" / "METADATA").write_text("Name: other\nVersion: 1\n")
    (tmp_path / "other-1.dist-info" / "entry_points.txt").write_text(f"[{GROUP}]\nother = package_with_a_check:check\n")
    (tmp_path / "package_with_a_check.py").write_text(OTHER_CHECK)
    monkeypatch.syspath_prepend(tmp_path)
    result = found(config_file)
    assert result.notices == ("a notice",) and [type(error) for error in result.errors] == [ConfigError, DataError]


@pytest.mark.parametrize("name", ["vlm", "simulatedd"])
def test_an_engine_that_nothing_declares_is_an_error(config_file: Path, name: str) -> None:
    assert f"one of simulated, transformers, vllm; found '{name}'" in errors(config_file, f"rollout.engine={name}")


@pytest.mark.parametrize(("scored_by", "count"), [("environment", 0), ("reward", 1)])
def test_a_set_that_its_environment_scores_needs_no_labels(config_file: Path, scored_by: str, count: int) -> None:
    (config_file.parent / "games.jsonl").write_text('{"prompt": "play"}\n')
    (config_file.parent / "play.py").write_text("def run(task, base_url, api_key): return 1.0\n")
    played = f"{{file: {config_file.parent / 'play.py'}, function: run, correctness: true}}"
    data = f"data: {config_file.parent / 'games.jsonl'}, answers: 2"
    sets = f"eval_sets=[{{name: games, {data}, environment: {played}, scored_by: {scored_by}}}]"
    result = found(config_file, sets, "eval_best=games/reward/environment")
    assert [error.expected for error in result.errors if "games.jsonl" in str(error)] == [
        f"a column answer in {config_file.parent / 'games.jsonl'}, for the reward exact"
    ] * count
    assert len(result.errors) == count
