"""The version that a request's `model` selects."""

import pytest

from polyreme.errors import ConfigError
from polyreme.gateway.names import ModelNames, parse_aliases


@pytest.fixture
def names() -> ModelNames:
    return ModelNames("letters", parse_aliases(["prod=17", "newest=latest", "policy"], "letters"))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (None, "any"),
        ("letters", "any"),
        ("policy", "any"),
        ("latest", "latest"),
        ("newest", "latest"),
        ("prod", 17),
        ("letters@0", 0),
        ("letters@12", 12),
        ("letters@", None),
        ("letters@-1", None),
        ("letters@x", None),
        ("letters@²", None),
        ("letters@" + "1" * 5000, None),
        ("other@1", None),
        ("other", None),
        ("", None),
    ],
)
def test_a_name_asks_for_a_version(names: ModelNames, model: str | None, wanted: object) -> None:
    assert names.wanted(model) == wanted


def test_the_list_has_every_name_that_can_be_asked_for(names: ModelNames) -> None:
    listed = names.listed([3, 4, 3])
    assert listed == ["letters", "latest", "newest", "policy", "prod", "letters@4", "letters@3"]
    assert all(names.wanted(name) is not None for name in listed)


@pytest.mark.parametrize(
    "word", ["=17", "a b=1", "prod=", "prod=x", "prod=-1", "prod=" + "1" * 5000, "a@1=2", "letters=3", "latest=3", "latest", ""]
)
def test_a_word_that_is_no_alias_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_aliases([word], "letters")
    assert "--alias" in error.value.do


def test_an_alias_has_one_meaning() -> None:
    with pytest.raises(ConfigError):
        parse_aliases(["prod=1", "prod=2"], "letters")
