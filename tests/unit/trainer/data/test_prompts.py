"""Rows, prompts and supervised examples, and the errors of bad rows."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from polyreme.config.data import DataConfig
from polyreme.errors import ConfigError, DataError
from polyreme_trainer.data.prompts import Dataset, load_prompts, read_rows
from polyreme_trainer.data.supervised import load_examples
from polyreme_trainer.data.template import Template
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(row, ...)`: a file with these rows. A string is a whole line."""

    def write(*rows: str | dict[str, Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write


def section(**fields: Any) -> DataConfig:
    return DataConfig(train="unused", **fields)


def prompts(path: Path, files: Mapping[str, bytes] | None = None, **fields: Any) -> Dataset:
    data = section(**fields)
    return load_prompts(path, data, Template(files or model_files(), data))


def test_chat_prompt(write: Write) -> None:
    dataset = prompts(write({"prompt": "a5b8=", "answer": "3", "level": 2}), system="add")
    (prompt,) = dataset.prompts
    assert prompt.text == "<system>add<user>a5b8=<assistant>"
    template = Template(model_files(), section())
    assert template.decode([prompt.ids.tolist()], special=True) == [prompt.text]
    assert template.decode([prompt.ids.tolist()], special=False) == ["adda5b8="]
    assert prompt.ids.dtype == np.int32 and len(prompt.ids) == 3 + 3 + 5
    assert prompt.label == "3" and json.loads(prompt.metadata_json) == {"prompt": "a5b8=", "level": 2} and dataset.filtered == 0


def test_messages_and_own_system_message(write: Write) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1="}]
    (prompt,) = prompts(write({"prompt": messages, "answer": 2}), system="ignored here").prompts
    assert prompt.text == "<system>x<user>1+1=<assistant>" and prompt.label == "2"


def test_messages_in_a_column_of_texts_have_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": [{"role": "user", "content": "2+3="}]}')
    (tmp_path / "a.csv").write_text('prompt\n"[{""role"": ""user"", ""content"": ""2+3=""}]"\n')
    one, other = (prompts(tmp_path / name).prompts[0] for name in ("a.jsonl", "a.csv"))
    assert one.text == other.text and one.plain == other.plain == "2+3="
    assert prompts(tmp_path / "a.csv", template="none").prompts[0].text.startswith("[{")


def test_template_none_takes_the_text_as_it_is(write: Write) -> None:
    (prompt,) = prompts(write({"prompt": "<user>1="}), model_files(chat_template=None), template="none").prompts
    assert prompt.text == "<user>1=" and len(prompt.ids) == 3 and prompt.label == ""


def tokenizer_that(change: Callable[[Tokenizer], None]) -> dict[str, bytes]:
    """Files of a tokenizer that was saved after `change` was applied."""
    files = model_files(chat_template=None)
    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    change(tokenizer)
    return {**files, "tokenizer.json": tokenizer.to_str().encode()}


def begin_with_bos(tokenizer: Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("<bos>", "<eos>")]
    )


def test_a_text_as_it_is_begins_with_what_the_tokenizer_puts_there(write: Write) -> None:
    files, data = tokenizer_that(begin_with_bos), section(template="none")
    path = write({"prompt": "1+1=", "response": "2"}, {"prompt": "<bos>1+1=", "response": "2"})
    template = Template(files, data)
    bare, begun = prompts(path, files, template="none").prompts
    assert template.decode([bare.ids.tolist(), begun.ids.tolist()], special=True) == ["<bos>1+1="] * 2
    assert bare.text == "1+1="
    examples = list(load_examples(path, data, template, max_tokens=20))
    assert template.decode([e.ids.tolist() for e in examples], special=True) == ["<bos>1+1=2<eos>"] * 2
    assert examples[0].loss_mask.tolist() == [0] * 5 + [1] * 2


def test_a_chat_template_writes_its_beginning_itself(write: Write) -> None:
    files = {**tokenizer_that(begin_with_bos), "chat_template.jinja": CHAT_TEMPLATE.encode()}
    (prompt,) = prompts(write({"prompt": "1+1="}), files).prompts
    assert Template(files, section()).decode([prompt.ids.tolist()], special=True) == ["<user>1+1=<assistant>"]


def test_how_a_saved_tokenizer_made_batches_is_not_taken_over(write: Write) -> None:
    def cut_and_fill(tokenizer: Tokenizer) -> None:
        tokenizer.enable_truncation(8)
        tokenizer.enable_padding(length=8)

    short, long = prompts(
        write({"prompt": "1="}, {"prompt": "1+2+3+4+5="}), tokenizer_that(cut_and_fill), template="none"
    ).prompts
    assert (len(short.ids), len(long.ids)) == (2, 10)


def test_paddlenlp_rows(write: Write) -> None:
    path = write({"src": ["1+2="], "tgt": ["3"]}, {"src": "2+2=", "tgt": "4"})
    rows = list(read_rows(path, section(prompt_key="src", label_key="tgt")))
    assert [(row.prompt, row.label) for row in rows] == [("1+2=", "3"), ("2+2=", "4")]


def test_unicode_line_separator_is_no_line_end(write: Write) -> None:
    assert next(read_rows(write('{"prompt": "a\u2028b"}', ""), section())).prompt == "a\u2028b"


def test_overlong_is_filtered_and_counted(write: Write) -> None:
    path = write({"prompt": "1" * 30}, {"prompt": "2"}, {"prompt": "3" * 8})
    dataset = prompts(path, max_prompt_tokens=10)
    assert [prompt.text for prompt in dataset.prompts] == ["<user>2<assistant>", "<user>33333333<assistant>"]
    assert dataset.filtered == 1


def test_overlong_is_an_error_by_choice(write: Write) -> None:
    path = write({"prompt": "2"}, {"prompt": "1" * 30})
    with pytest.raises(DataError, match=r"rows.jsonl:2; found 32\."):
        prompts(path, max_prompt_tokens=10, overlong="error")


def test_all_overlong(write: Write) -> None:
    with pytest.raises(DataError, match="found 1, all longer"):
        prompts(write({"prompt": "1" * 30}), max_prompt_tokens=10)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": ', "rows.jsonl:2; found Expecting value at column"),
        ("[1]", "a JSON object in .*rows.jsonl:2; found list"),
        ('{"question": "x"}', r"a column 'prompt' in .*rows.jsonl:2; found columns \['question'\].*data.prompt_key"),
        ('{"prompt": ""}', "'prompt' in .*rows.jsonl:2; found an empty text"),
        ('{"prompt": ["a", "b"]}', "chat messages .*rows.jsonl:2"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}', "before the answer .*rows.jsonl:2"),
        ('{"prompt": "x", "answer": {"a": 1}}', "a text or number in 'answer' in .*rows.jsonl:2"),
    ],
)
def test_bad_row(write: Write, line: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        list(read_rows(write({"prompt": "fine"}, line), section()))


def test_half_a_character_names_the_line(write: Write) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:2; found \\ud83d"):
        list(read_rows(write({"prompt": "\U0001f600 is whole"}, '{"prompt": "fine", "note": ["\\ud83d x"]}'), section()))


def test_missing_and_empty_file(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError, match="No such file"):
        list(read_rows(tmp_path / "nowhere.jsonl", section()))
    with pytest.raises(DataError, match="at least one row"):
        list(read_rows(write(""), section()))


def test_examples_end_with_the_end_token_and_mask_the_prompt(write: Write) -> None:
    data = section()
    template = Template(model_files(), data)
    (example,) = load_examples(write({"prompt": "1+1=", "response": "#2"}), data, template, max_tokens=20)
    assert template.decode([example.ids.tolist()], special=True) == ["<user>1+1=<assistant>#2<eos>"]
    assert example.loss_mask.tolist() == [0] * 6 + [1] * 3 and example.loss_mask.dtype == np.uint8


def test_examples_too_long_or_without_response(write: Write) -> None:
    data = section()
    template = Template(model_files(), data)
    with pytest.raises(DataError, match=r"within 8 tokens in .*:1; found 9"):
        list(load_examples(write({"prompt": "1+1=", "response": "#2"}), data, template, max_tokens=8))
    with pytest.raises(DataError, match="a column 'response'"):
        list(load_examples(write({"prompt": "1+1="}), data, template, max_tokens=8))


def examples(path: Path, files: dict[str, bytes], **fields: Any) -> list[tuple[str, str]]:
    """Each example as the texts of its prompt and of its labels."""
    data = section(**fields)
    template = Template(files, data)
    return [
        (template.decode([e.ids[e.loss_mask == 0]], special=True)[0], template.decode([e.ids[e.loss_mask == 1]], special=True)[0])
        for e in load_examples(path, data, template, max_tokens=40)
    ]


def test_a_response_that_ends_in_the_end_token_gets_no_second_one(write: Write) -> None:
    path = write({"prompt": "1+1=", "response": "2<eos>"}, {"prompt": "1+1=", "response": "2"})
    assert examples(path, model_files()) == [("<user>1+1=<assistant>", "2<eos>")] * 2
    assert examples(path, model_files(), template="none") == [("1+1=", "2<eos>")] * 2


@pytest.mark.parametrize("mode", ["chat", "none"])
def test_an_end_token_inside_a_response_names_the_line(write: Write, mode: str) -> None:
    path = write({"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "2<eos>3"})
    with pytest.raises(DataError, match=r"rows.jsonl:2"):
        examples(path, model_files(), template=mode)


def test_labels_have_what_the_template_writes_before_an_answer(write: Write) -> None:
    template = CHAT_TEMPLATE.replace("<{{ m['role'] }}>{{", "<{{ m['role'] }}>{% if m['role'] == 'assistant' %} {% endif %}{{")
    assert examples(write({"prompt": "1=", "response": "1"}), model_files(template)) == [("<user>1=<assistant>", " 1<eos>")]


def test_what_the_template_writes_after_the_end_token_is_left_out(write: Write) -> None:
    template = CHAT_TEMPLATE.replace("<eos>", "<eos> ")
    assert examples(write({"prompt": "1=", "response": "1"}), model_files(template)) == [("<user>1=<assistant>", "1<eos>")]


def test_a_template_that_opens_an_answer_in_another_way_than_it_writes_a_past_one(write: Write) -> None:
    template = CHAT_TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'].split('#')[-1] if m['role'] == 'assistant' else m['content'] }}"
    ).replace("%}<assistant>{%", "%}<assistant>,{%")
    assert examples(write({"prompt": "1=", "response": "a#1"}), model_files(template)) == [("<user>1=<assistant>,", "a#1<eos>")]


def test_a_conversation_has_the_tokens_of_its_whole_text(write: Write) -> None:
    """A tokenizer like sentencepiece's puts a space before every text. A response after its prompt has none."""

    def prefix_space(tokenizer: Any) -> None:
        tokenizer.normalizer = normalizers.Prepend(" ")

    files = tokenizer_that(prefix_space)
    assert examples(write({"prompt": "1+1=", "response": "2"}), files, template="none") == [(" 1+1=", "2<eos>")]


def test_a_token_across_the_seam_belongs_to_the_response(write: Write) -> None:
    def whole_words(tokenizer: Any) -> None:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_tokens(["a+a"])

    files = tokenizer_that(whole_words)
    files["config.json"] = json.dumps({"vocab_size": 49}).encode()
    path = write({"prompt": "a a+", "response": "a b"}, {"prompt": "a ", "response": "b"})
    assert examples(path, files, template="none") == [("a", "a+ab<eos>"), ("a", "b<eos>")]


@pytest.mark.parametrize("kind", ["prompt", "response"])
def test_an_id_without_an_embedding_names_file_row_id_and_sizes(write: Write, kind: str) -> None:
    files = {**model_files(), "config.json": b'{"vocab_size": 46}'}  # the last two of the tokenizer's 48 tokens are y and z
    data = section()
    template = Template(files, data)
    fine = {"prompt": "x", "response": "x"}
    path = write(fine, fine | {kind: "z"})
    with pytest.raises(DataError) as caught:
        list(load_examples(path, data, template, max_tokens=20))
    for piece in ("rows.jsonl:2", "46", "47", "48"):
        assert piece in str(caught.value)
    if kind == "prompt":
        with pytest.raises(DataError, match=r"rows.jsonl:2"):
            load_prompts(path, data, template)


def test_an_end_token_without_an_embedding() -> None:
    with pytest.raises(ConfigError, match=r"48 embeddings .* id 48"):
        Template(model_files(generation_eos=[1, 48]), section())


def test_a_closing_token_that_is_no_stop_token() -> None:
    template = CHAT_TEMPLATE.replace("<eos>", "<pad>")
    assert Template(model_files(template), section()).unstopped == ("<pad>",)
    assert Template(model_files(template, generation_eos=0), section()).unstopped == ()
    assert Template(model_files(), section()).unstopped == ()


def test_stop_ids_are_a_union() -> None:
    assert Template(model_files(generation_eos=[0, 1]), section()).stop_ids == (0, 1)
    assert Template(model_files(generation_eos=5), section()).stop_ids == (1, 5)


def test_end_id_is_what_the_template_writes() -> None:
    template = CHAT_TEMPLATE.replace("<eos>", "<pad>")
    assert Template(model_files(template, generation_eos=[0]), section()).end_id == 0
    assert Template(model_files(template), section()).end_id == 1  # <pad> would not stop a rollout


def test_no_end_token() -> None:
    with pytest.raises(ConfigError, match="an end token"):
        Template(model_files(eos=None), section())


def test_template_without_generation_prompt() -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    with pytest.raises(ConfigError, match="'<assistant>'"):
        Template(model_files(template), section())


def test_template_that_needs_no_generation_prompt() -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}+{{ m['content'] }}="
        "{% else %} {{ m['content'] }}<eos>{% endif %}{% endfor %}"
    )
    assert Template(model_files(template), section()).render(["1"]) == ["+1="]


def test_no_template() -> None:
    with pytest.raises(ConfigError, match=r"data.template: none"):
        Template(model_files(chat_template=None), section())
    with pytest.raises(ConfigError, match=r"data.system together"):
        Template(model_files(chat_template=None), section(template="none", system="x"))


def test_template_refusing_a_row_names_the_line(write: Write) -> None:
    template = "{% if messages[0]['content'] == 'bad' %}{{ raise_exception('not this') }}{% endif %}" + CHAT_TEMPLATE
    with pytest.raises(DataError, match=r"rows.jsonl:2; found TemplateError"):
        prompts(write({"prompt": "good"}, {"prompt": "bad"}), model_files(template))


def test_no_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json"):
        Template({"config.json": b"{}"}, section())


def test_templates_have_different_digests() -> None:
    digests = {Template(model_files(), section(system=system)).digest for system in (None, "a", "b")}
    assert len(digests) == 3


def test_imports_no_torch() -> None:
    code = "import sys, polyreme_trainer.data.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_keeps_its_plain_text(write: Write) -> None:
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1="}]
    found = prompts(write({"prompt": "2="}, {"prompt": ["3="]}, {"prompt": messages})).prompts
    assert [prompt.plain for prompt in found] == ["2=", "3=", "1+1="]
    assert all(prompt.text.startswith("<") for prompt in found)


def test_a_source_whose_prompts_are_all_repeated(write: Write) -> None:
    path = write({"prompt": "1+1=", "answer": "2"})
    data = DataConfig(train=(path, path), deduplicate=True)
    with pytest.raises(DataError) as error:
        load_prompts(data.train, data, Template(model_files(), data))
    assert "data.deduplicate" in error.value.do and "1 repeated" in error.value.found
