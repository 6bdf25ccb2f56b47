"""Scripts are read as bash would understand them, and what they leave open is never a value."""

from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme.import_config.reading.read import Read, read_file
from polyreme.import_config.rules import Unresolved


def opened(found: Read) -> dict[str, str]:
    """The values that the file leaves open."""
    return {key: str(value) for key, value in found.values.items() if isinstance(value, Unresolved)}


def read(text: str, tmp_path: Path, name: str = "run.sh") -> Read:
    (tmp_path / name).write_text(text)
    return read_file(tmp_path / name)


COMMAND = "python3 -m verl.trainer.main_ppo a.b="


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("X=1\n@$X", 1),
        ("export X=2; @${X}", 2),
        ('X="a b"\n@"$X"', "a b"),
        ("X=${X:-3}\n@$X", 3),
        ("@${X-4}", 4),
        ("@${X:=5}", 5),
        (": ${X:=5}\n@$X", 5),
        ("X=\n@${X:-6}", 6),
        ("X=y\n@${X:+7}", 7),
        ("A=/d B=x\n@${A}/$B.parquet", "/d/x.parquet"),
        ("N=4\n@$((1024 * (N + 2)))", 6144),
        ("N=4 ; M=$((N*2))\n@$(( M / 3 ))", 2),
        ("@$((2 ** 3 % 5))", 3),
        ("X=(1 '2 x' 3)\n@\"${X[1]}\"", "2 x"),
        ("X=(1 2 3)\n@${#X[@]}", 3),
        ("X=Qwen/Qwen2-7B\n@${X##*/}", "Qwen2-7B"),
        ("X=a.tar.gz\n@${X%%.*}", "a"),
        ("X=a.tar.gz\n@${X%.*}", "a.tar"),
        ("X=actor.a,actor.b\n@${X//actor/critic}", "critic.a,critic.b"),
        ("X=ABC\n@${X,,}", "abc"),
        ("X=abcdef\n@${X:1:3}", "bcd"),
        ("a=1 b=2\n@\"['$a','$b']\"", ["1", "2"]),
        ('@\'["console","wandb"]\'', ["console", "wandb"]),
        ("@['console','wandb']", ["console", "wandb"]),
        ('@\\"text\\"', "text"),
        ("@$'a\\nb'", "a b"),  # YAML folds a line
        ("@1e-6", 1e-6),
        ("@.5e-3", 5e-4),
        ("@null", None),
        ("@'User: {}'", "User: {}"),
        ("@2024-01-31", "2024-01-31"),
        ("@$HOME/data", "~/data"),
        ("@0 \\\n   a.b=8", 8),
        ("@0 +a.b=9", 9),
        ("@0 ++a.b=9 $@", 9),
        ("CMD='@10'\neval $CMD", 10),
        ("CMD='@11'\n$CMD \"$@\"", 11),
        ('bash -c "@12"', 12),
        ("srun -N 1 bash -lc '@13'", 13),
        ("cd /x && @14 2>&1 | tee log.txt", 14),
        ("cat <<E > f\nX=0 \"don't\nE\nX=15\n@$X", 15),
        ('Y=16\nif [ -z "$X" ]; then Z=1; fi\n@$Y', 16),
        ('K=b\nif [[ $K == "a" ]]; then Y=1; elif [ $K = b ]; then Y=17; else Y=3; fi\n@$Y', 17),
        ("K=c\nif [ $K = a ]; then Y=1; elif [ $K = b ]; then Y=2; else Y=17; fi\n@$Y", 17),
        ("K=1 J=2\nif [ $K = 1 ] && [ $J = 3 ]; then Y=1; else Y=17; fi\n@$Y", 17),
        ("K=1\n[ $K -gt 2 ] && Y=1 || Y=18\n@$Y", 18),
        ('K=m\ncase "$K" in\n s|t) Y=1 ;;\n m) Y=19 ;;\n *) Y=3 ;;\nesac\n@$Y', 19),
        ("K=t\ncase $K in s|t) Y=19 ;; *) Y=3 ;; esac\n@$Y", 19),
        ("for n in 20; do @$n; done", 20),
        ("while [[ $# -gt 0 ]]; do case $1 in --x) Y=2; shift;; esac; done\nY=${Y:-21}\n@$Y", 21),
        ("if [[ ${1} != slurm ]]; then\n @22\nfi", 22),
        ('run() {\n  @23 "$@"\n}\nrun', 23),
        ("function run {\n  @23\n}\nrun", 23),
        ("X=a#b # comment ' \"\n@$X", "a#b"),
        ("CUDA_VISIBLE_DEVICES=0,1 \\\n @24", 24),
        ("set -x\n@25 > log 2>&1 &", 25),
        ("X=2\nX+=6\n@$X", 26),
        ("declare -i X=27\nlocal Y=$X\n@$Y", 27),
        ('X=" \\\n  a.b=28 \\\n  a.c=1"\n@0 $X', 28),
        ("X=1\r\n@$X\r\n", 1),
        ("read -r -d '' C <<EOF || true\n@29\nEOF\n$C", 29),
        ("cat <<A; X=30\n$(\nA\n@$X", 30),
        ("X=31\nsbatch <<EOT\n#!/bin/bash\n@$X\nEOT", 31),
        ("ssh host bash <<'EOT'\nX=32\n@$X\nEOT", 32),
        ("ray job submit -- bash -c '@33'", 33),
        ('[[ "a-7b-c" == *"7b"* ]] && Y=34\n@$Y', 34),
        ('X=${MODEL:-"a/b"}\n@$X', "a/b"),
        ("X=(1 35 3) I=1\n@${X[$I]}", 35),
        ("X=(1 2 36) I=1\n@${X[I + 1]}", 36),
        ("X=(1 2 37)\n@${X[-1]}", 37),
        ("X=(1)\nX=()\nX+=(38)\n@${X[@]}", 38),
        ("K=s\ncase $K in s|t) Y=39 ;; *) Y=3 ;; esac\n@$Y", 39),
        ("K=s\ncase $K in\n s|t)\n  Y=40 ;;\n *) Y=3 ;;\nesac\n@$Y", 40),
        ("K=s\ncase $K in (s) Y=41;; (*) Y=3;; esac\n@$Y", 41),
        ("K=a J=c\nif [[ $K == a && $J == b ]]; then Y=1; else Y=42; fi\n@$Y", 42),
        ("K=a J=\nif [[ -n $J || ( $K == b ) ]]; then Y=1; fi\n@43", 43),
        ("K=a J=\nif [[ -n $J || $K == a ]]; then Y=44; else Y=1; fi\n@$Y", 44),
        ("K=a\nif ! [ $K = b ]; then Y=45; else Y=1; fi\n@$Y", 45),
        ("K=1\nuntil [ $K = 1 ]; do Y=1; done\n@${Y:-46}", 46),
        ("f() {\n Y=$1\n}\ng() { Y=2; }\nf 47\n@$Y", 47),
        ("f ()\n{\n Y=${2:-48}; if [ $# = 1 ]; then shift; fi\n}\nf 1\n@$Y", 48),
        ('f() {\n @"$@"\n}\nf 49', 49),
        ('function f {\n shift\n @"$1"\n}\nf 1 50', 50),
        ('f() {\n @"${@:2}"\n}\nf 1 51', 51),
        ("X=(1 2 52 4)\n@${X[@]:2:1}", 52),
        ("@53 ${@:2}", 53),
    ],
)
def test_values_of_a_script(script: str, value: Any, tmp_path: Path) -> None:
    found = read(script.replace("@", COMMAND, 1), tmp_path)
    assert found.values["a.b"] == value and not opened(found)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("@$train_files", "$train_files"),
        ("@${X}/y", "${X}/y"),
        ("X=$(pwd)\n@$X/reward.py", "$(pwd)/reward.py"),
        ("@`date`", "`date`"),
        ("@$1", "$1"),
        ("X=${1}\n@$X", "${1}"),
        ('X=1\nif [ "$MODE" = big ]; then X=2; fi\n@$X', "$X"),
        ('if [ "$MODE" = big ]; then X=1; else X=2; fi\n@$X', "$X"),
        ('X=1\n[ -n "$MODE" ] && X=2\n@$X', "$X"),
        ("case $MODE in a) X=1 ;; *) X=2 ;; esac\n@$X", "$X"),
        ("@$((GPUS * 2))", "$((GPUS * 2))"),
        ("for n in 1 2; do\n @$n\ndone", "$n"),
        ("read -p name X\n@$X", "$X"),
        ("source env.sh\n@$X", "$X"),
        ("@\"['$a']\"", "['$a']"),
        ("X=a\n@${X@Q}", "${X@Q}"),
        ("X=a\n@${!X}", "${!X}"),
        ("X=(1 2)\n@${X[$I]}", "${X[$I]}"),
        ("declare -A X=([a]=1 [b]=2)\n@${X[a]}", "${X[a]}"),
        ("X=a.b\n@${X/%b/c}", "${X/%b/c}"),
        ("X=1\nif nvidia-smi | grep -q H100; then X=2; fi\n@$X", "$X"),
        ("X=1\nif (( N > 4 )); then X=2; fi\n@$X", "$X"),
        ("X=1 K=ab\nif [[ $K =~ ^(a|b) ]]; then X=2; fi\n@$X", "$X"),
        ("X=1 K=a\nif [[ -z $K || -f x ]]; then X=2; fi\n@$X", "$X"),
        ("X=1\nf() { X=2; }\n[ -n $MODE ] && f\n@$X", "$X"),
        ("f() {\n @${1:-1}\n}\nexport -f f\nparallel f ::: 1 2", "$1"),
    ],
)
def test_what_a_script_leaves_open_is_not_a_value(script: str, text: str, tmp_path: Path) -> None:
    found = read(script.replace("@", f"{COMMAND[:-4]}a.c=1 {COMMAND[-4:]}", 1), tmp_path)
    assert found.values == {"a.b": text, "a.c": 1} and opened(found) == {"a.b": text}


def test_equal_values_of_both_branches_are_known(tmp_path: Path) -> None:
    assert read(f'X=1\nif [ "$M" = a ]; then X=1; fi\n{COMMAND}$X', tmp_path).values == {"a.b": 1}


def test_arrays_with_comments_and_additions_under_conditions(tmp_path: Path) -> None:
    script = """
    WORK_DIR=$(cd "$(dirname "$0")/.." && pwd)
    CKPT=(
       --pretrain ${MODEL:-m}
       # --reward_pretrain ${REWARD} don't
       --save_path "${WORK_DIR}/exp"
    )
    PPO=( --n_samples_per_prompt 8 --eps_clip_low_high 0.2 0.27 )
    if [ "$USE_GAMMA" = "true" ]; then PPO+=(--gamma 0.9); fi
    PPO+=(--lambd 0.95)
    ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/x"}' \\
       -- python3 -u -m openrlhf.cli.train_ppo_ray ${CKPT[@]} \\
       "${PPO[@]}" --use_wandb {token} --max_steps -1
    """
    found = read(script, tmp_path)
    assert found.values == {
        "pretrain": "m",
        "n_samples_per_prompt": 8,
        "eps_clip_low_high": [0.2, 0.27],
        "lambd": 0.95,
        "use_wandb": "{token}",
        "max_steps": -1,
        "save_path": '$(cd "$(dirname "$0")/.." && pwd)/exp',
    }
    assert set(opened(found)) == {"save_path"}
    assert [words for words, _ in found.notes] == ["--gamma 0.9"]


def test_a_command_in_a_here_document(tmp_path: Path) -> None:
    script = """
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray \\
   --pretrain ${MODEL:-m} \\
   --max_epochs 2
EOF
     # --packing_samples
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
    found = read(script, tmp_path)
    assert found.values == {"pretrain": "m", "max_epochs": 2} and not found.notes


def test_options_of_nested_values_and_removed_keys(tmp_path: Path) -> None:
    found = read(f'{COMMAND}\'{{"x": 1, "y": [2]}}\' a.c=1 ~a.c a.d=2 a.d=3 --config-name=megatron', tmp_path)
    assert found.values == {"a.b.x": 1, "a.b.y": [2], "a.d": 3, "config-name": "megatron"}


def test_the_training_command_is_chosen_among_several(tmp_path: Path) -> None:
    prepare = "python3 examples/data_preprocess/gsm8k.py --local_dir /d --a 1 --b 2 --c 3 --d 4\n"
    found = read(f"{prepare}{COMMAND}1\npython -m verl.model_merger --x 1\n", tmp_path)
    assert found.values == {"a.b": 1} and not found.notes
    found = read(f"{COMMAND}1\n{COMMAND}2\n", tmp_path)
    assert found.values == {"a.b": 1} and "2 training commands" in found.notes[0][1]
    debug = f'[ "$DEBUG" = 1 ] && {COMMAND}3\nprintf "%s" {COMMAND}4\n{COMMAND}1'
    assert read(debug, tmp_path).values == {"a.b": 1}


@pytest.mark.parametrize(
    "program", ["src/grpo_after_sft.py", "train_grpo_vllm.py", "scripts/rloo_reward.py", "verl.trainer.main_ppo"]
)
def test_a_program_named_after_an_algorithm_is_training(program: str, tmp_path: Path) -> None:
    start = program if program.endswith(".py") else f"-m {program}"
    script = f"python eval_grpo.py --a 1 --b 2\npython prepare.py --a 1 --b 2\npython {start} --beta 0.1\n"
    found = read(script, tmp_path)
    assert found.values == {"beta": 0.1} and not found.notes


def test_what_is_said_about_a_script(tmp_path: Path) -> None:
    assert read(f"{COMMAND}1 $EXTRA", tmp_path).notes[0][0] == "$EXTRA"
    assert "a condition" in read(f'if [ "$X" = a ]; then {COMMAND}1; fi', tmp_path).notes[0][1]
    broken = read(f"{COMMAND}1 \\\n  # a.c=2 \\\n  a.d=3\n", tmp_path)  # bash ends the command at the comment
    assert broken.values == {"a.b": 1} and broken.notes[0][0] == "a.d=3"


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("accelerate launch --config_file z.yaml --num_processes=7", 7),
        ("torchrun --nproc_per_node 4 --nnodes 2", 8),
        ("deepspeed --num_gpus 2", 2),
        ("accelerate launch --num-processes 3", 3),
        ("torchrun --nproc_per_node 4 --nnodes $NNODES", None),
        ("torchrun --nproc_per_node 4 --nnodes 1:4", None),
        ("python", None),
    ],
)
def test_processes_of_the_launcher_and_the_configuration_that_it_names(
    launcher: str, processes: int | None, tmp_path: Path
) -> None:
    (tmp_path / "grpo.yaml").write_text("{learning_rate: 1.0e-06, beta: 0.1}")
    found = read(f"{launcher} src/open_r1/grpo.py --config grpo.yaml --beta 0.2", tmp_path)
    assert found.values.pop("num_processes", None) == processes
    assert found.values == {"learning_rate": 1e-6, "beta": 0.2}
    missing = read(f"{launcher} grpo.py --config other.yaml --beta 0.2", tmp_path)
    assert missing.notes[0][0] == "--config other.yaml" and "missing" in missing.notes[0][1]


@pytest.mark.parametrize(
    "command",
    [
        "python cli/train_grpo.py --config-name grpo_7b | tee log",
        "python cli/train_grpo.py --config-path=configs --config-name=grpo_7b.yaml",
        "python -u -m paddle.distributed.launch --gpus '0,1' run_rl.py configs/grpo_7b.yaml",
        "python -m torch.distributed.run --nproc_per_node 2 grpo.py --config configs/grpo_7b.yaml",
    ],
)
def test_the_configuration_that_a_command_names_is_read(command: str, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "grpo_7b.yaml").write_text("rl_config: {gamma: 1.0}")
    (tmp_path / "scripts").mkdir()
    assert read(command, tmp_path / "scripts").values["rl_config.gamma"] == 1.0
    with pytest.raises(ConfigError, match="grpo_8b"):
        read(command.replace("7b", "8b"), tmp_path / "scripts")


def test_the_command_of_trl_is_found_behind_another_tool(tmp_path: Path) -> None:
    found = read("uv run --with trl trl grpo --beta 0.1", tmp_path)
    assert (found.values, found.program) == ({"beta": 0.1}, "trl grpo")


def test_processes_in_the_configuration_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("{num_processes: 6, mixed_precision: bf16}")
    assert read("accelerate launch --config_file zero3.yaml grpo.py --beta 0.2", tmp_path).values["num_processes"] == 6
    found = read("accelerate launch --config_file zero3.yaml --num_processes 5 grpo.py --beta 0.2", tmp_path)
    assert found.values["num_processes"] == 5
    for options in ("none.yaml", "zero3.yaml --num_processes $N"):
        assert "num_processes" not in read(f"accelerate launch --config_file {options} grpo.py --beta 0.2", tmp_path).values


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("-m verl.trainer.fsdp_sft_trainer data.a=1", "polyreme sft"),
        ("-m openrlhf.cli.train_dpo --a 1", "polyreme dpo"),
        ("-m openrlhf.cli.train_rm --a 1", "polyreme reward-model"),
        ("trl/scripts/kto.py --a 1", "polyreme dpo"),
    ],
)
def test_other_kinds_of_training_name_their_command(program: str, command: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=command):
        read(f"python {program}", tmp_path)


def test_references_of_hydra(tmp_path: Path) -> None:
    text = """
data: {train_batch_size: 64, path: ~/d}
actor: {mini: "${data.train_batch_size}", n: "${.mini}", file: "${data.path}/x", other: "${oc.select:a.b,5}"}
env: {home: "${oc.env:HOME}/x", user: "${oc.env:USER}", given: "${oc.env:N,3}", must: "???", when: "${now:%Y}", loop: "${env.loop}"}
"""
    found = read(text, tmp_path, "run.yaml")
    assert found.values == {
        "data.train_batch_size": 64,
        "data.path": "~/d",
        "actor.mini": 64,
        "actor.n": 64,
        "actor.file": "~/d/x",
        "actor.other": 5,
        "env.home": "~/x",
        "env.given": 3,
        "env.user": "${oc.env:USER}",
        "env.when": "${now:%Y}",
        "env.loop": "${env.loop}",
    }
    assert set(opened(found)) == {"env.user", "env.when", "env.loop"}


@pytest.mark.parametrize(
    "text",
    [
        "echo 'open",
        'echo "open',
        "x=$(open",
        "x=${open",
        "x=(a b",
        "cat <<E\nopen",
        "`",
        "$((",
        "if",
        "case x",
        "fi done esac",
        "\\",
    ],
)
def test_a_script_that_bash_would_refuse_has_no_traceback(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.sh"):
        read(text, tmp_path)


def test_nothing_is_executed_and_large_files_are_refused(tmp_path: Path) -> None:
    found = read(f"X=$(touch {tmp_path}/made)\n`touch {tmp_path}/made`\n{COMMAND}$((9**9**9)) a.c=1", tmp_path)
    assert opened(found) == {"a.b": "$((9**9**9))"} and not (tmp_path / "made").exists()
    with pytest.raises(ConfigError, match="nested too deeply"):
        read("x=" + "$(" * 50_000, tmp_path)
    with pytest.raises(ConfigError, match="MiB"):
        read("#" * (5 << 20), tmp_path)
