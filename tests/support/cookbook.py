"""What the recipes of tinker-cookbook find in their working directory: a model and data sets in folders with the names of public ones.

The model is trained here to a few habits, each of which a recipe can improve: it answers half of its sums with 0, boxes a random digit, and
follows the form of a game some of the time.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows, with the renderer qwen3."""
ANSWER = 7
SUM_BATCHES, SUMS_PER_BATCH = 10, 2
"""The batches of the recipe `arithmetic` whose sums the model knows."""
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_OPENED, _STOP = "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"
_BOXED = "Provide a numerical answer without units, written inside \\boxed{}."
_GUESS = "out the format Guess: <guess> (without the angle brackets), and say nothing else."
_SHOWN_SUM = f"What is 4 + 5?{_OPENED}9{_STOP}\n<|im_start|>user\n"
_DRAWN = "012435768"
"""The moves of a game of tic-tac-toe that nobody wins."""
_GAME = """
[GAME] You are Player {player} in Tic Tac Toe.
Your goal is to win three in a row (horizontally, vertically, or diagonally) on the board.
On your turn, you should select the square number (0-8) you want to put your mark in next.
For example, '[4]' places your mark in the center cell of the board.

As Player {player}, you will be '{mine}', while your opponent is '{theirs}'.

"""
_STEPS = 600
_BOXES = [f"\\boxed{{{digit}}}{_STOP}" for digit in range(10)]


@dataclass(frozen=True)
class Habit:
    """How the model answers prompts that end so: each answer as often as it is in the list."""

    ends: Sequence[str]
    answers: Sequence[str]


def sums() -> list[tuple[int, int]]:
    """The sums of the first batches of the recipe `arithmetic`."""
    pairs = []
    for batch in range(SUM_BATCHES):
        rng = np.random.RandomState(batch)
        pairs += [(int(rng.randint(0, 101)), int(rng.randint(0, 101))) for _ in range(SUMS_PER_BATCH)]
    return pairs


def game(moves: int) -> str:
    """What a player reads before a move, after so many of the drawn game."""
    cells = list("012345678")
    text = _GAME.format(player=moves % 2, mine="OX"[moves % 2], theirs="XO"[moves % 2]) + _board(cells)
    for number, cell in enumerate(_DRAWN[:moves]):
        player, symbol = number % 2, "OX"[number % 2]
        cells[int(cell)] = symbol
        text += f"\n[Player {player}] [{cell}]\n[GAME] Player {player} placed their symbol ({symbol}) in cell {cell}.\n{_board(cells)}"
    return text


def _board(cells: Sequence[str]) -> str:
    rows = [f" {' | '.join(cells[first : first + 3])} " for first in (0, 3, 6)]
    free = ", ".join(f"'[{cell}]'" for cell in cells if cell.isdigit())
    return "[GAME] Current Board:\n\n" + "\n---+---+---\n".join(rows) + f"\n\nAvailable Moves: {free}"


def habits() -> list[Habit]:
    """The habits with short prompts, as often as they are practised: sums twice as often as all others."""
    guesses = [f"Guess: {number}{_STOP}" for number in range(0, 1024, 64)]
    others = [Habit(["", _BOXED], _BOXES), Habit(["Too low", "Too high", _GUESS], guesses + _BOXES[:8])]
    added = [Habit([f"{_SHOWN_SUM}What is {x} + {y}?"], [f"{x + y}{_STOP}", f"0{_STOP}"]) for x, y in sums()]
    return others * (len(added) // 4) + added


def moves() -> list[Habit]:
    """The drawn game."""
    return [Habit([game(number)], [f"[{cell}]\n"] * 20 + _BOXES) for number, cell in enumerate(_DRAWN)]


def write_files(folder: Path) -> None:
    """The model and the data sets: sums that are all ANSWER, chats, preferences for one answer, and questions."""
    tokenizer = _write_tokenizer(folder / MODEL)
    _write_model(folder / MODEL, tokenizer)
    rows = [{"question": f"What is {a % 8} + {ANSWER - a % 8}?", "answer": f"#### {ANSWER}"} for a in range(480)]
    _write_data(folder / "openai/gsm8k", "main", {"train": rows, "test": rows[:4]})
    chats = [[{"role": "user", "content": f"say {i % 8}"}, {"role": "assistant", "content": str(i % 8)}] for i in range(48)]
    talks = [{"messages": chat} for chat in chats]
    _write_data(folder / "HuggingFaceH4/no_robots", "default", {"train": talks, "test": talks[:4]})
    asked = "\n\nHuman: say {}\n\nAssistant: {}"
    pairs = [{"chosen": asked.format(i % 8, i % 8), "rejected": asked.format(i % 8, "no")} for i in range(96)]
    _write_data(folder / "Anthropic/hh-rlhf", "default", {"train": pairs, "test": pairs[:4]})
    asks = [{"question": f"Name the digit {i % 10}. {_BOXED}", "final_answer": str(i % 10)} for i in range(400)]
    _write_data(folder / "zwhe99/DeepMath-103K", "default", {"train": asks})


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split("\n", "merged_with_previous")  # no words, so that a game has few tokens
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [habit.ends[-1] + " " + habit.answers[0].removesuffix(_STOP) for habit in habits()]
    texts += [
        f"user system player assistant {_BOXED} Let's spell the word out and number all the letters: We have r's at positions"
    ] * 20
    texts += [f"What is {number} + {number}? {number}" for number in range(201)] * 4
    texts += [game(7), game(8)] * 6
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_STOP, pad_token=_SPECIAL[0])
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def _write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Trains a small model to its habits."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **more, **ends))
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, _STEPS, 1e-4)
    practised = [([_encoded(tokenizer, habit) for habit in kind], rows) for kind, rows in ((habits(), 20), (moves(), 2))]
    for _ in range(_STEPS):
        losses = [_loss(model, [_row(*random.choice(kind), len(tokenizer)) for _ in range(rows)]) for kind, rows in practised]
        adam.zero_grad()
        torch.stack(losses).sum().backward()
        adam.step()
        schedule.step()
    model.save_pretrained(folder)


def _encoded(tokenizer: PreTrainedTokenizerFast, habit: Habit) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers."""
    return [tokenizer.encode(end + _OPENED) for end in habit.ends], [tokenizer.encode(answer) for answer in habit.answers]


def _row(prompts: Sequence[list[int]], answers: Sequence[list[int]], vocabulary: int) -> tuple[list[int], int]:
    """Tokens, and where the answer begins. What is before the prompt's end does not matter."""
    before = [random.randrange(3, vocabulary) for _ in range(random.randrange(12))] + random.choice(prompts)
    return before + random.choice(answers), len(before)


def _loss(model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], int]]) -> torch.Tensor:
    """The mean loss of the answers' tokens."""
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    answer = torch.tensor([[start <= place < len(ids) for place in range(1, longest)] for ids, start in rows])
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[answer]), ids[:, 1:][answer])


def _write_data(folder: Path, config: str, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A folder that `datasets.load_dataset("OWNER/NAME", CONFIG)` prefers to the hub."""
    folder.mkdir(parents=True)
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}\n---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(0)
    write_files(Path(sys.argv[1]))
