"""Choices, tags, puzzles, lengths and repetitions."""

import pytest

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, RewardError
from polyreme_reward.rules import BUILTINS, make_rule


def ask(name: str, response: str, label: str = "", **options: object) -> object:
    return make_rule(name, options)(Item("", "prompt", response, label=label))


@pytest.mark.parametrize(
    ("response", "chosen"),
    [
        ("C", "C"),
        ("(c)", "C"),
        (" **C**. ", "C"),
        ("The answer is C.", "C"),
        ("The answer is (C), not D", "C"),
        ("Answer: C", "C"),
        ("I first thought the answer is A. But the correct answer is: **C**", "C"),
        (r"A or B? \boxed{C}", "C"),
        (r"\boxed{A}, no, \boxed{\text{C}}", "C"),
        ("The answer, I believe, is C.", "C"),
        ("The answer is C. I am confident in this answer.", "C"),
        ("The answer to part (a) is C", "C"),
        ("Answer: c", "C"),
        ("The answer is (c).", "C"),
        (r"\boxed{\textbf{(C)}\ 12}", "C"),
        (r"\boxed{\mathrm{C}}", "C"),
        (r"\boxed{C. 12}", "C"),
        (r"\boxed{(C) Paris}", "C"),
        (r"\boxed{12}", None),
        (r"\boxed{Cats}", None),
        ("Answer: I think C", "C"),
        ("Answer: I'd say C", "C"),
        ("A C", None),
        ("perhaps C", None),
        ("The answer is unclear", None),
        ("", None),
        ("Z", None),
    ],
)
def test_choice(response: str, chosen: str | None) -> None:
    for label in "ABCD":
        assert ask("choice", response, label) == float(label == chosen)
    assert ask("choice", f"<answer>{response}</answer>", "(C)", after="<answer>", before="</answer>") == float(chosen == "C")


@pytest.mark.parametrize("response", ["The answer is I.", "The answer is I because it is larger.", "Answer: (I) I think"])
def test_the_ninth_choice_is_not_a_pronoun(response: str) -> None:
    assert ask("choice", response, "I") == 1.0


def test_a_choice_needs_a_letter_as_label() -> None:
    with pytest.raises(RewardError, match="letters ABCD"):
        ask("choice", "A", "7", letters="ABCD")


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>so</think><answer>3</answer>", 1.0),
        ("\n<think></think>\n\n<answer>3</answer>\n", 1.0),
        ("<think>so</think> thus <answer>3</answer>", 0.0),
        ("well <think>so</think><answer>3</answer>", 0.0),
        ("<think>so</think><answer>3</answer> ok", 0.0),
        ("<think>so</think><answer> </answer>", 0.0),
        ("<think>a</think><think>b</think><answer>3</answer>", 0.0),
        ("<answer>3</answer><think>so</think>", 0.0),
        ("<think>so<answer>3</answer></think>", 0.0),
        ("</think>so<think><answer>3</answer>", 0.0),
        ("<think>so</think>3", 0.0),
        ("", 0.0),
    ],
)
def test_think_format(response: str, score: float) -> None:
    assert ask("think_format", response) == score


def test_think_format_without_answer_tags_and_with_a_tag_in_the_prompt() -> None:
    assert ask("think_format", "<think>so</think>3", answer=None) == 1.0
    assert ask("think_format", "<think>so</think> ", answer=None) == 0.0
    assert ask("think_format", "so</think><answer>3</answer>", prefilled=True) == 1.0


LABEL = "(1) Zoey is a knave\n(2) Oliver is a knight"
RIGHT = "<answer>(1) Zoey is a knave (2) Oliver is a knight</answer>"


@pytest.mark.parametrize(
    ("response", "binary", "paddlenlp"),
    [
        (f"<think>hm</think>{RIGHT}", 1.0, 3.0),
        (f"hm</think>{RIGHT}", 1.0, 3.0),
        (f"<think>hm{RIGHT}", 1.0, -3.0),
        ("<think>hm</think><answer>Zoey is a knight, Oliver is a knight</answer>", 0.0, -0.5),
        ("<think>hm</think><answer>Zoey is a knave</answer>", 0.0, -1.0),
        ("<think>Zoey is a knave, Oliver is a knight</think><answer>?</answer>", 0.0, -1.0),
        ("Zoey is a knight. No: Zoey is a knave and Oliver is a knight.", 1.0, -3.0),
        ("**Zoey** is\u00a0a **knave**, and Oliver\u202fis a knight.", 1.0, -3.0),
        ("", 0.0, -3.0),
    ],
)
def test_knights_and_knaves(response: str, binary: float, paddlenlp: float) -> None:
    assert ask("knights_and_knaves", response, LABEL) == binary
    assert ask("knights_and_knaves", response, LABEL, scores="paddlenlp") == paddlenlp


def test_knights_and_knaves_need_roles_in_the_label() -> None:
    with pytest.raises(RewardError, match="roles"):
        ask("knights_and_knaves", "x", "42")


def test_length_and_overlong() -> None:
    assert ask("length", "one two  three") == 3.0
    assert ask("length", "one two", unit="characters") == 7.0
    scores = [ask("overlong", "w " * words, limit=10, margin=4) for words in (0, 6, 7, 8, 10, 11, 1000)]
    assert scores == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]


def test_repetition() -> None:
    assert ask("repetition", "a b c d e f") == 0.0
    assert ask("repetition", "a b") == 0.0
    assert ask("repetition", "a b a b a b a b") == pytest.approx(2 / 6 - 1)
    assert ask("repetition", "a " * 1000, size=1) == pytest.approx(-0.999)


@pytest.mark.parametrize(
    ("name", "options"),
    [("overlong", {}), ("overlong", {"limit": 0, "margin": 1}), ("length", {"unit": "tokens"}), ("repetition", {"size": 0})],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=name):
        make_rule(name, options)


def test_every_builtin_has_a_description_of_one_line() -> None:
    for name, builtin in BUILTINS.items():
        assert builtin.description.endswith((".", "else 0.", "first.")), name
