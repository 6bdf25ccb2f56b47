"""The continuation of conversations, over templates that behave as those of the model families do."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.config.data import DataConfig
from polyreme.dataset.chat import Chat
from polyreme.errors import ConfigError, DataError
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from support.family_templates import SPECIAL, TEMPLATES, family_files
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files

FAMILIES = sorted(TEMPLATES)
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
QUESTION = [{"role": "user", "content": "hello"}]
AGAIN = [{"role": "user", "content": "higher than 12"}]

words = st.text("abeghlrtuow 12\n.,é", min_size=1, max_size=20)


@cache
def of(family: str) -> tuple[Template, Tail]:
    template = Template(family_files(family), DataConfig(train=Path("unused")))
    return template, Tail(template)


def text_of(template: Template, ids: np.ndarray) -> str:
    return template.decode([ids.tolist()], special=True)[0]


@pytest.mark.parametrize("family", FAMILIES)
@given(pieces=st.lists(words, min_size=1, max_size=4), new=words, is_cut=st.booleans())
def test_what_was_sampled_stays_and_only_the_new_messages_follow(family: str, pieces: list[str], new: str, is_cut: bool) -> None:
    """The answer's tokens are those of its pieces, which differ from the tokens of the joined text."""
    template, tail = of(family)
    answer = np.concatenate([*template.encode(pieces), [] if is_cut else [template.end_id]]).astype(np.int32)
    exact = np.concatenate([tail.begin(QUESTION), answer])
    behind = tail.after(exact, [{"role": "user", "content": new}])
    assert behind.dtype == np.int32
    assert (behind[0] == template.end_id) == is_cut, "an answer that was cut gets the end that it did not sample"
    whole = [*QUESTION, {"role": "assistant", "content": "y"}, {"role": "user", "content": new}]
    rendered = template.apply([Chat(tuple(whole))], generation_prompt=True)[0]
    _, _, follows = rendered.rpartition("y" + SPECIAL[template.end_id])
    assert text_of(template, behind[is_cut:]) == follows
    np.testing.assert_array_equal(behind[is_cut:], template.encode([follows])[0])


@pytest.mark.parametrize("family", ["qwen2.5", "mistral", "gemma"])
@given(
    turns=st.lists(
        st.tuples(st.text("abehlotw", min_size=1, max_size=8), st.text("abehl", min_size=1, max_size=8)), min_size=1, max_size=4
    )
)
def test_a_conversation_of_usual_tokens_is_the_one_that_the_template_renders(family: str, turns: list[tuple[str, str]]) -> None:
    template, tail = of(family)
    lead = " " if family == "mistral" else ""
    exact, messages = tail.begin(QUESTION), list(QUESTION)
    for answer, question in turns:
        exact = np.concatenate([exact, template.encode([lead + answer])[0], [template.end_id]])
        new = [{"role": "user", "content": question}]
        exact = np.concatenate([exact, tail.after(exact, new)]).astype(np.int32)
        messages += [{"role": "assistant", "content": answer}, *new]
    np.testing.assert_array_equal(exact, tail.begin(messages))


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3"])
@pytest.mark.parametrize(
    "answer", ["hello \n", "<think>\nhm\n</think>\n\nhello", '<tool_call>\n{"name": "f", "arguments": {"a":12}}\n</tool_call>']
)
@pytest.mark.parametrize(
    "new", [AGAIN, [{"role": "tool", "content": "408"}], [{"role": "tool", "content": "<|im_end|>"}, *AGAIN]]
)
def test_blanks_thoughts_and_calls_of_an_answer_change_nothing(family: str, answer: str, new: list[dict[str, str]]) -> None:
    """Re-rendering would strip the blanks, drop the thought, and write the arguments anew."""
    template, tail = of(family)
    first, other = (
        np.concatenate([tail.begin(QUESTION, TOOLS), template.encode([text])[0], [template.end_id]]).astype(np.int32)
        for text in (answer, "hello")
    )
    np.testing.assert_array_equal(tail.after(first, new, TOOLS), tail.after(other, new, TOOLS))
    rest = text_of(template, tail.after(first, new, TOOLS))
    opened = template.apply([Chat(tuple(QUESTION))], generation_prompt=True)[0].removeprefix(
        template.apply([Chat(tuple(QUESTION))], generation_prompt=False)[0]
    )
    assert new[0]["content"] in rest and rest.endswith(opened)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama3"])
@given(results=st.lists(st.tuples(st.sampled_from(["multiply", "é", ""]), words), min_size=1, max_size=3), is_cut=st.booleans())
def test_results_of_tools_follow_as_the_template_writes_them(family: str, results: list[tuple[str, str]], is_cut: bool) -> None:
    template, tail = of(family)
    answer = template.encode(['<tool_call>\n{"name": "multiply", "arguments": {"a":12}}\n</tool_call>'])[0]
    exact = np.concatenate([tail.begin(QUESTION, TOOLS), answer, [] if is_cut else [template.end_id]]).astype(np.int32)
    new = [{"role": "tool", "content": text, **({"name": name} if name else {})} for name, text in results]
    behind = tail.after(exact, new, TOOLS)
    assert (behind[0] == template.end_id) == is_cut
    calls = [{"type": "function", "function": {"name": name or "f", "arguments": {}}} for name, _ in results]
    called = {"role": "assistant", "content": "y", "tool_calls": calls}
    chat = Chat((*QUESTION, called, *new), tuple(TOOLS))
    rendered = template.apply([chat], generation_prompt=True)[0]
    before = template.apply([Chat((*QUESTION, called), tuple(TOOLS))], generation_prompt=False)[0].rstrip("\n")
    assert rendered.startswith(before)
    np.testing.assert_array_equal(behind[is_cut:], template.encode([rendered.removeprefix(before)])[0])


def test_results_have_the_names_and_ids_of_their_calls() -> None:
    """Templates that write them, as some families do."""
    written = (
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{% if m.role == 'tool' %}{{ m.name }},{{ m.tool_call_id }},{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }},{{ c.id }},{% endfor %}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = Template(model_files(written), DataConfig(train=Path("unused")))
    new = [{"role": "tool", "name": "add", "content": "4"}, {"role": "tool", "name": "sub", "content": "5"}]
    behind = Tail(template).after(np.array([template.end_id], np.int32), new, TOOLS)
    assert text_of(template, behind) == "<tool>add,call00000,4<tool>sub,call00001,5<assistant>".replace(
        "<tool>", "<unk>tool<unk>"
    )


def test_an_answer_that_stopped_at_another_token_gets_its_end() -> None:
    template, tail = of("qwen3")
    exact = np.append(tail.begin(QUESTION), np.int32(SPECIAL.index("<|endoftext|>")))
    assert tail.after(exact, AGAIN)[0] == template.end_id


def test_the_runs_system_message_begins_a_conversation() -> None:
    template = Template(family_files("qwen3"), DataConfig(train=Path("unused"), system="be brief"))
    assert text_of(template, Tail(template).begin(QUESTION)).startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_the_newest_prompts_are_kept_for_the_episodes_of_a_task() -> None:
    _, tail = of("qwen3")
    first = tail.begin(QUESTION)
    assert tail.begin([{**each} for each in QUESTION]) is first and not first.flags.writeable
    assert len(tail.begin(QUESTION, TOOLS)) > len(first)
    for number in range(300):
        tail.begin([{"role": "user", "content": str(number)}])
    again = tail.begin(QUESTION)
    assert again is not first and np.array_equal(again, first), "others have taken its place"


ROLES = "<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
OTHERS = f"{{% for m in messages if m.role != 'system' %}}{ROLES}{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
SYSTEM = {"role": "system", "content": "the door is shut"}


@pytest.mark.parametrize(
    ("written", "new"),
    [
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}" + OTHERS, [SYSTEM]),
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}<eos>{% endfor %}" + OTHERS, [SYSTEM, *AGAIN]),
        ("{% for m in messages if m.role == 'system' %}{{ m.content }}<eos>{% endfor %}" + OTHERS, [{**SYSTEM, "content": ""}]),
        (OTHERS, [*AGAIN, SYSTEM]),
        (OTHERS.replace("'system'", "'tool'"), [{"role": "tool", "content": "42"}]),
    ],
    ids=["collected", "with an end", "empty", "left out", "no tools"],
)
def test_a_message_that_does_not_stand_behind_is_refused(written: str, new: list[dict[str, str]]) -> None:
    template = Template(model_files(written), DataConfig(train=Path("unused")))
    tail, exact = Tail(template), np.array([20, template.end_id], np.int32)
    for _ in range(2):
        with pytest.raises(DataError, match="behind the answer"):
            tail.after(exact, new)
    assert text_of(template, tail.after(exact, [{"role": "user", "content": "go on"}])) == "<user>go on<assistant>"


def test_texts_that_a_template_writes_anew_are_no_obstacle() -> None:
    written = "{% for m in messages %}{% if m.role == 'assistant' %}y<eos>{% else %}{{ m.content | trim | tojson }}{% endif %}{% endfor %}"
    template = Template(model_files(written), DataConfig(train=Path("unused")))
    behind = Tail(template).after(np.array([template.end_id], np.int32), [{"role": "tool", "content": ' a"b \n'}, *AGAIN])
    assert text_of(template, behind) == '"a\\"b""higher than 12"'.replace('"', "<unk>").replace("\\", "<unk>")


def test_a_vocabulary_of_a_few_characters_continues() -> None:
    files = model_files()
    tokenizer = json.loads(files["tokenizer.json"])
    del tokenizer["model"]["vocab"]["n"]
    template = Template({**files, "tokenizer.json": json.dumps(tokenizer).encode()}, DataConfig(train=Path("unused")))
    behind = Tail(template).after(np.array([template.end_id], np.int32), [{"role": "user", "content": "12"}])
    assert text_of(template, behind) == "<user>12<assistant>"


def test_what_cannot_be_continued_is_refused() -> None:
    _, tail = of("mistral")
    exact = tail.begin(QUESTION)
    with pytest.raises(DataError, match="alternate"):
        tail.after(exact, [*AGAIN, *AGAIN])
    for wrong in ([], [{"role": "assistant", "content": "y"}]):
        with pytest.raises(DataError, match="new messages behind an answer"):
            tail.after(exact, wrong)
    with pytest.raises(ConfigError, match="template: none"):
        Tail(Template(model_files(None), DataConfig(train=Path("unused"), template="none")))
    endless = CHAT_TEMPLATE.replace("<eos>", "")
    with pytest.raises(ConfigError, match="a stop token behind an answer"):
        Tail(Template(model_files(endless), DataConfig(train=Path("unused"))))
    forgetful = (
        "{% for m in messages[-1:] %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    only = Tail(Template(model_files(forgetful), DataConfig(train=Path("unused"))))
    with pytest.raises(DataError, match="keeps earlier answers"):
        only.after(np.array([7], np.int32), AGAIN)
