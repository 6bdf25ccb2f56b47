"""TRL's Python scripts: what a script trains is what the imported run trains, and what it decides at its start is said."""

import math
from pathlib import Path
from typing import Any

import pytest

from polyreme.errors import ConfigError
from polyreme.import_config.application import Imported
from polyreme.import_config.systems import import_file
from support.imports import import_text, lost_keys, mathematics

HEAD = "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer\n"
DATA = 'load_dataset("openai/gsm8k", "main", split="train")'


def imported(text: str, rows: int = 1600) -> tuple[Imported, Any]:
    return import_text(HEAD + text, rows=rows, suffix=".py")


def trained(config: str = "", **arguments: str) -> str:
    """A script of one configuration and one trainer."""
    given = {"model": '"m"', "reward_funcs": "accuracy_reward", "train_dataset": DATA, "args": "args", **arguments}
    words = ", ".join(f"{name}={value}" for name, value in given.items())
    return (
        f"from trl.rewards import accuracy_reward\nargs = GRPOConfig({config})\ntrainer = GRPOTrainer({words})\ntrainer.train()\n"
    )


def reason(found: Imported, key: str) -> str:
    [entry] = [entry for entry in found.lost if entry.key == key]
    return entry.note if entry.value is None else f"{entry.value} {entry.note}"


def test_a_script_with_everything_in_two_calls() -> None:
    """16 x 2 completions are 4 prompts of 8; one step an iteration; a linear rate of 2e-6 after 10 steps of warm-up."""
    found, run = imported(
        "from trl.rewards import accuracy_reward, think_format_reward\nfrom peft import LoraConfig\n"
        "config = GRPOConfig(output_dir='runs/gsm', learning_rate=2e-6, num_generations=8, per_device_train_batch_size=16,\n"
        "    gradient_accumulation_steps=2, max_completion_length=256, beta=0.04, warmup_steps=10, max_steps=100,\n"
        "    scale_rewards=False, loss_type='dr_grpo', reward_weights=[1.0, 0.5])\n"
        "trainer = GRPOTrainer(model='Qwen/Qwen2.5-0.5B-Instruct', reward_funcs=[accuracy_reward, think_format_reward], args=config,\n"
        f"    train_dataset={DATA}, peft_config=LoraConfig(r=16, lora_alpha=64, target_modules='all-linear', task_type='CAUSAL_LM'))\n"
        "trainer.train()\n"
    )
    assert lost_keys(found) == []
    assert mathematics(run) == {
        "advantage": {"kind": "group_mean", "whiten": False},
        "loss": {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None, "ratio": "token"},
        "aggregation": "seq-mean-token-sum-norm",
        "kl": {"place": "loss", "estimator": "k3+", "coef": 0.04},
        "rates": pytest.approx([2e-7, 4e-7, 2e-6 * 51 / 90, 2e-6 * 2 / 90, 2e-6 / 90]),
        "critic rates": None,
        "batch": (4, 8, 1, 1),
        "ranks": ("tensor 1 x data 1", 1, 1),
    }
    assert (run.output_dir.name, run.rollout.max_new_tokens, run.iterations) == ("gsm", 256, 100)
    assert (run.trainer.lora.rank, run.trainer.lora.alpha, run.trainer.lora.targets) == (16, 64, None)
    assert [(each.label, each.weight) for each in run.reward.rewards] == [("math", 1.0), ("think_format", 0.5)]
    assert found.values["model.path"] == "Qwen/Qwen2.5-0.5B-Instruct" and found.values["data.train"] == "openai/gsm8k"
    assert "how many processes" in found.comments["groups_per_iteration"]


def test_names_texts_and_arithmetic() -> None:
    found, run = imported(
        "import os\nMODEL, LR = 'Qwen/Qwen3-8B', 5e-7\nPROMPTS = 4\nGENERATIONS = 2 ** 3\n"
        + trained(
            "learning_rate=LR * 2, per_device_train_batch_size=PROMPTS * GENERATIONS, num_generations=GENERATIONS,"
            " output_dir=f'out/{MODEL.split(\"/\")[-1]}-{GENERATIONS:02d}', max_steps=1_000 // 4,"
            " temperature=0.7 if GENERATIONS > 4 else 1.0",
            model="MODEL",
        )
    )
    assert lost_keys(found) == []
    assert (run.trainer.optimizer.lr, run.groups_per_iteration, run.group_size, run.iterations) == (1e-6, 4, 8, 250)
    assert (found.values["output_dir"], found.values["model.path"]) == ("out/Qwen3-8B-08", "Qwen/Qwen3-8B")
    assert run.rollout.temperature == 0.7


def test_defaults_of_the_environment_and_of_argparse_are_said() -> None:
    found, run = imported(
        "import argparse, os\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float, default='3e-6')\n"
        "parser.add_argument('--max-steps', dest='steps', type=int, default=50)\nparser.add_argument('--bf16', action='store_true')\n"
        "parser.add_argument('--run', required=True)\nopts = parser.parse_args()\n"
        + trained(
            "learning_rate=opts.lr, max_steps=opts.steps, run_name=opts.run, bf16=opts.bf16,"
            " beta=float(os.environ.get('BETA', '0.1')), seed=int(os.environ['SEED'])"
        )
    )
    assert (run.trainer.optimizer.lr, run.iterations, run.model.dtype, run.algorithm.kl.coef) == (3e-6, 50, "float32", 0.1)
    assert set(lost_keys(found)) == {"run_name", "defaults", "seed"} and run.seed == 42
    assert all(word in reason(found, "defaults") for word in ("--lr: 3e-06", "--steps: 50", "--bf16: False", "${BETA}: 0.1"))
    assert "a variable of the environment" in reason(found, "seed") and "line 11" in reason(found, "seed")
    assert "which the command line gives" in reason(found, "run_name") and "name" not in found.values


def test_a_main_function_and_a_dataclass() -> None:
    found, run = imported(
        "from dataclasses import dataclass, field\n@dataclass\nclass Options:\n    lr: float = 4e-6\n"
        "    weights: list = field(default_factory=lambda: [2.0])\n    steps: int = field(default=30)\n"
        "def main(beta=0.2):\n    options = Options(steps=60)\n"
        "    args = GRPOConfig('out', learning_rate=options.lr, reward_weights=options.weights, max_steps=options.steps, beta=beta)\n"
        f"    GRPOTrainer('m', ['org/reward-model'], args, {DATA}).train()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert lost_keys(found) == []
    assert (run.trainer.optimizer.lr, run.iterations, run.algorithm.kl.coef) == (4e-6, 60, 0.2)
    assert found.values["reward.rewards"] == [{"model": "org/reward-model", "weight": 2.0}]


def test_mappings_and_attributes_of_the_configuration() -> None:
    found, run = imported(
        "COMMON = dict(learning_rate=1e-6, max_steps=40)\nARGUMENTS = {**COMMON, 'learning_rate': 3e-6, 'num_generations': 4}\n"
        "from trl.rewards import accuracy_reward\nargs = GRPOConfig(output_dir='o', lr_scheduler_kwargs={'min_lr_rate': 0.1},\n"
        "    lr_scheduler_type='cosine_with_min_lr', **ARGUMENTS)\nargs.beta = 0.5\nsetattr(args, 'seed', 7)\n"
        f"GRPOTrainer(model='m', reward_funcs=accuracy_reward, args=args, train_dataset={DATA}).train()\n"
    )
    assert lost_keys(found) == []
    assert (run.trainer.optimizer.lr, run.group_size, run.algorithm.kl.coef, run.seed) == (3e-6, 4, 0.5, 7)
    assert run.trainer.optimizer.min_lr == pytest.approx(3e-7)
    assert mathematics(run)["rates"][-1] == pytest.approx(3e-7 + 2.7e-6 * (1 + math.cos(math.pi * 39 / 40)) / 2)


@pytest.mark.parametrize(
    ("before", "option", "why"),
    [
        ("import json\nlr = json.load(open('x'))['lr']\n", "learning_rate=lr", "json.load"),
        ("lr = 1e-5\nif BIG:\n    lr = 1e-6\n", "learning_rate=lr", "`lr` is assigned in lines 3, 5"),
        ("if BIG:\n    lr = 1e-6\n", "learning_rate=lr", "a condition"),
        ("for lr in (1e-5, 1e-6):\n    print(lr)\n", "learning_rate=lr", "a loop"),
        ("lr = 1e-6\nlr *= 2\n", "learning_rate=lr", "assigned in lines"),
        ("lr = [1e-6]\nlr.append(1)\n", "learning_rate=lr[0]", "changed after"),
        ("def f():\n    global lr\n    lr = 1\nlr = 1e-6\n", "learning_rate=lr", "assigned in lines"),
        ("try:\n    lr = 1e-6\nexcept ImportError:\n    pass\n", "learning_rate=lr", "a `try`"),
        ("import settings\n", "learning_rate=settings.lr", "`settings.lr`"),
        ("def lr():\n    return 1e-6\n", "learning_rate=lr()", "the call lr(...)"),
        ("", "learning_rate=lr", "does not define"),
        ("", "learning_rate=1e-6 if BIG else 1e-5", "a condition"),
        ("", "learning_rate=sum([1e-6])", "the call sum(...)"),
        ("def fix(options):\n    options['lr'] = 1\nall = {'lr': 1e-6}\nfix(all)\n", "learning_rate=all['lr']", "changed after"),
        ("import os\nos.environ['LR'] = '1'\n", "learning_rate=float(os.environ.get('LR', '2'))", "the script sets"),
        ("a, b = 1, 2\nmatch a:\n    case 1:\n        lr = 1e-6\n", "learning_rate=lr", "depends on"),
        ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr', type=read, default='1e-6')\no = p.parse_args()\n",
         "learning_rate=o.lr", "that read converts"),
        ("from trl import TrlParser\nclass O:\n    lr: float = 1e-6\n    def __post_init__(self):\n        self.lr = 1\n"
         "o, = TrlParser((O,)).parse_args_and_config()\n", "learning_rate=o.lr", "the class computes"),
        ("", "learning_rate=float('%s' % (1,))", "a text with %"),
        ("int = len\n", "learning_rate=int('1')", "the call int(...)"),
        ("", "learning_rate=1 / 0", "ZeroDivisionError"),
        ("", "learning_rate=9 ** 9 ** 9", "too large"),
    ],
)  # fmt: skip
def test_what_only_a_run_knows_is_a_loss(before: str, option: str, why: str) -> None:
    found, run = imported(before + trained(option))
    assert lost_keys(found) == ["learning_rate"] and run.trainer.optimizer.lr == 1e-6
    assert why in reason(found, "learning_rate") and "line " in reason(found, "learning_rate")
    assert "used here: 1e-06" in reason(found, "learning_rate")


def test_a_loop_over_several_trainings() -> None:
    found, run = imported("for lr in (1e-6, 2e-6):\n    " + trained("learning_rate=lr, beta=0.3").replace("\n", "\n    ") + "\n")
    assert lost_keys(found) == ["trainer", "learning_rate"] and run.algorithm.kl.coef == 0.3


def test_rewards_of_the_script_are_never_those_of_trl() -> None:
    """A function named as TRL's, one that reads messages, and one of a module."""
    found, _ = imported(
        "from my.rewards import short\ndef accuracy_reward(completions, answer, **kwargs):\n    return [0.0 for _ in completions]\n"
        "def format_reward(completions, **kwargs):\n    return [float('<' in c[0]['content']) for c in completions]\n"
        "def main():\n    args = GRPOConfig(reward_weights=[1, 2, 3])\n"
        f"    GRPOTrainer('m', [accuracy_reward, format_reward, short], args, {DATA}).train()\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert found.values["reward.rewards"] == [
        {"name": "accuracy_reward", "file": "FILL_IN/accuracy_reward.py", "weight": 1},
        {"name": "format_reward", "file": "FILL_IN/format_reward.py", "weight": 2},
        {"name": "short", "module": "my.rewards", "function": "short", "weight": 3},
    ]
    assert lost_keys(found) == ["accuracy_reward", "format_reward"]
    assert reason(found, "accuracy_reward").endswith("works unchanged")
    assert "{file: original.py, function: format_reward}" in reason(found, "format_reward")
    assert "a completion is a text here" in reason(found, "format_reward")


def test_a_reward_of_a_script_that_trains_when_imported() -> None:
    found, _ = imported(
        "def r(prompts, completions):\n    return [1.0]\nscore = lambda completions: [0.0]\n" + trained(reward_funcs="[r, score]")
    )
    assert "starts its training" in reason(found, "r") and "a function of a module" not in reason(found, "r")


@pytest.mark.parametrize(
    ("reward", "wanted", "lost"),
    [
        ("get_soft_overlong_punishment(max_completion_len=512, soft_punish_cache=128)", [], []),
        ("'org/rm', accuracy_reward", [{"model": "org/rm", "weight": 1.0}, {"name": "math", "weight": 1.0}], []),
        ("Judge()", [{"name": "judge", "file": "FILL_IN/judge.py", "weight": 1.0}], ["Judge()"]),
        ("unknown", [{"name": "unknown", "file": "FILL_IN/unknown.py", "weight": 1.0}], ["unknown"]),
        ("*OTHERS", [{"name": "others", "file": "FILL_IN/others.py", "weight": 1.0}], ["*OTHERS"]),
    ],
)
def test_kinds_of_rewards(reward: str, wanted: list[dict[str, Any]], lost: list[str]) -> None:
    found, run = imported("from trl.rewards import get_soft_overlong_punishment\n" + trained(reward_funcs=f"[{reward}]"))
    assert lost_keys(found) == lost
    if wanted:
        assert found.values["reward.rewards"] == wanted
    else:
        assert (run.algorithm.shaping.overlong.buffer, run.algorithm.shaping.overlong.factor) == (0.25, 1.0)


def test_weights_follow_a_model_to_the_first_place() -> None:
    found, _ = imported(trained("reward_weights=[0.1, 0.9]", reward_funcs="[accuracy_reward, 'org/rm']"))
    assert found.values["reward.rewards"] == [{"model": "org/rm", "weight": 0.9}, {"name": "math", "weight": 0.1}]


def test_changed_rows_are_losses() -> None:
    found, _ = imported(
        "rows = load_dataset('openai/gsm8k', 'socratic')\nrows = rows['train'].rename_column('question', 'prompt')\n"
        "rows = rows.map(lambda row: row).remove_columns(['answer'])\n" + trained(train_dataset="rows")
    )
    assert found.values["data.train"] == "openai/gsm8k" and found.values["data.prompt_key"] == "question"
    assert found.values["data.config"] == "socratic" and lost_keys(found) == ["train_dataset.map"]


@pytest.mark.parametrize(
    ("data", "lost", "train"),
    [
        ("load_dataset('json', data_files='rows.jsonl', split='train')", [], "rows.jsonl"),
        ("load_dataset('a/b', split='train[:100]')", ["dataset_train_split"], "a/b"),
        ("load_dataset('a/b')['test']", [], "a/b"),
        ("load_dataset('a/b', split='train').shuffle(seed=1).select(range(9))",
         ["train_dataset.shuffle", "train_dataset.select"], "a/b"),
        ("load_dataset('a/b', data_dir='x', split='train')", ["load_dataset"], "a/b"),
        ("Dataset.from_list([{'prompt': 'x'}])", ["train_dataset"], "FILL_IN/data"),
        ("build()", ["train_dataset"], "FILL_IN/data"),
    ],
)  # fmt: skip
def test_data(data: str, lost: list[str], train: str) -> None:
    found, _ = imported(trained(train_dataset=data))
    assert (lost_keys(found), found.values["data.train"]) == (lost, train)


def test_a_model_object_with_adapters_of_peft() -> None:
    """PEFT's defaults differ from those of TRL's command line: rank 8, alpha 8, no dropout, and two projections."""
    found, run = imported(
        "import torch\nfrom peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('org/base', torch_dtype=torch.bfloat16, revision='v2').to('cuda')\n"
        "model = get_peft_model(model, LoraConfig(bias='all', use_dora=False))\n" + trained(model="model")
    )
    assert (run.trainer.lora.rank, run.trainer.lora.alpha, run.trainer.lora.targets) == (8, 8, ["q_proj", "v_proj"])
    assert found.values["model.path"] == "org/base@v2" and lost_keys(found) == ["peft_config.bias"]


def test_unsloth() -> None:
    """4 bits and all linear layers are its defaults."""
    found, run = imported(
        "from unsloth import FastLanguageModel\n"
        "model, tokenizer = FastLanguageModel.from_pretrained(model_name='unsloth/Qwen3-4B', max_seq_length=2048)\n"
        "model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, use_gradient_checkpointing='unsloth', random_state=3407)\n"
        + trained(model="model", processing_class="tokenizer")
    )
    assert (run.trainer.lora.rank, run.trainer.lora.alpha, run.trainer.lora.targets) == (32, 64, None)
    assert found.values["model.path"] == "unsloth/Qwen3-4B" and lost_keys(found) == ["load_in_4bit"]


def test_rloo_and_a_trainer_without_a_configuration(tmp_path: Path) -> None:
    """The class says which trainer it is, whatever the file's name."""
    script = tmp_path / "grpo.py"
    script.write_text(
        HEAD + f"from trl.rewards import accuracy_reward\nRLOOTrainer('m', accuracy_reward, RLOOConfig(max_steps=9), {DATA})\n"
    )
    _, found = import_file(script)
    assert (found.values["algorithm.preset"], found.values["iterations"], found.values["group_size"]) == ("rloo", 9, 2)
    script.write_text(
        HEAD + f"from trl.rewards import accuracy_reward\nGRPOTrainer('m', accuracy_reward, train_dataset={DATA})\n"
    )
    _, found = import_file(script, rows=160)
    assert (found.values["algorithm.preset"], found.values["groups_per_iteration"], found.values["iterations"]) == (
        "grpo",
        1,
        480,
    )


def test_parsers_of_dataclasses() -> None:
    """A script's own options have defaults; TRL's own come from a command line or YAML file, and are refused."""
    head = (
        "from dataclasses import dataclass\nfrom trl import TrlParser\nfrom trl.rewards import accuracy_reward\n"
        "@dataclass\nclass Script:\n    lr: float = 2e-6\n    name: str = None\n"
    )
    found, run = imported(
        f"{head}script = TrlParser(Script).parse_args_and_config()[0]\n"
        + trained("learning_rate=script.lr, run_name=script.name")
    )
    assert run.trainer.optimizer.lr == 2e-6 and lost_keys(found) == ["defaults"]
    own = "@dataclass\nclass Own(GRPOConfig):\n    beta: float = 0.7\n"
    end = f"parser = TrlParser((Script, %s))\nscript, args = parser.parse_args_and_config()\nGRPOTrainer('m', accuracy_reward, args, {DATA})\n"
    found, run = imported(head + own + end % "Own")
    assert run.algorithm.kl.coef == 0.7 and "--beta: 0.7" in reason(found, "defaults")
    with pytest.raises(ConfigError, match=r"a parser .line 10.: they come from a command line or its YAML file"):
        imported(head + end % "GRPOConfig")


@pytest.mark.parametrize(
    ("text", "found", "advice"),
    [
        ("from trl import SFTConfig, SFTTrainer\nSFTTrainer('m', args=SFTConfig())", "SFTTrainer", "polyreme sft"),
        ("import trl\ntrl.DPOTrainer(model='m', args=trl.DPOConfig(beta=0.1))", "DPOTrainer", "polyreme dpo"),
        ("from trl import RewardTrainer as T\nT(model='m')", "RewardTrainer", "polyreme reward-model"),
        ("from trl.experimental.ppo import PPOTrainer\nPPOTrainer(args=1)", "PPOTrainer", "algorithm.preset: ppo"),
        ("from trl import OnlineDPOTrainer\nOnlineDPOTrainer(model='m')", "OnlineDPOTrainer", "algorithm.preset: grpo"),
        ("print(1)", "a Python script without one", "GRPOTrainer"),
        ("print(", "was never closed", "GRPOTrainer"),
        ("if BIG:\n    a = GRPOConfig()\nelse:\n    a = GRPOConfig()\nGRPOTrainer('m', args=a)", "`a` is assigned in lines 4, 6", "one of them"),
        ("a = make()\nGRPOTrainer('m', args=a)", "0; args is", "into the script"),
        ("from trl import GRPOTrainer\nGRPOTrainer('m', args=GRPOConfig(rloo_k=4))", "the first RLOOConfig", "preset: rloo"),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_to_do(text: str, found: str, advice: str) -> None:
    with pytest.raises(ConfigError) as error:
        imported(text)
    assert found in str(error.value) and advice in str(error.value)


def test_a_script_of_one_system_is_not_another() -> None:
    with pytest.raises(ConfigError, match="Only scripts of TRL"):
        import_text(HEAD + trained(), "verl", suffix=".py")


def test_nothing_about_a_training_is_silent() -> None:
    """Callbacks, optimizers, tools, methods of the script's own trainer, later changes, and a second trainer."""
    found, _ = imported(
        "from trl import SFTTrainer\nfrom trl.rewards import accuracy_reward\nSFTTrainer('m').train()\n"
        "class Mine(GRPOTrainer):\n    def compute_loss(self):\n        return 0\n"
        "def fix(config):\n    config.beta = 0.9\n"
        "args = GRPOConfig(never_heard_of=1)\nfix(args)\nif BIG:\n    args.seed = 5\n"
        f"trainer = Mine('m', accuracy_reward, args, {DATA}, callbacks=[Stop()], optimizers=(None, None), strange=1, **more)\n"
        "trainer.args.top_p = 0.9\ntrainer.epsilon_low = 0.1\n"
    )
    assert set(lost_keys(found)) == {
        "SFTTrainer", "Mine", "config.beta", "args.seed", "callbacks", "strange", "**more", "args.top_p", "never_heard_of",
        "trainer.epsilon_low",
    }  # fmt: skip
    found, _ = imported(trained(tools="[search]"))
    assert lost_keys(found)[0] == "tools" and "environment.file" in found.values


def test_a_trainer_of_another_module_and_one_of_two_values() -> None:
    found, run = imported(
        "from mine.trainer import GRPOTrainer as Mine\nfrom peft import LoraConfig\nFULL = False\n"
        + trained(peft_config="None if FULL else LoraConfig(r=4)").replace("GRPOTrainer(", "Mine(")
    )
    assert lost_keys(found) == ["mine.trainer.GRPOTrainer"] and run.trainer.lora.rank == 4
    with pytest.raises(ConfigError, match="they come from a command line or its YAML file"):
        imported(
            "from transformers import HfArgumentParser\nargs = HfArgumentParser(GRPOConfig).parse_yaml_file('x.yaml')[0]\n"
            "GRPOTrainer('m', args=args)\n"
        )
