import pytest

from polyreme.errors import ConfigError
from polyreme_rollout.engine.sleep import check_sleep


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true"),
        ("PYTORCH_NPU_ALLOC_CONF", "page_size:1g,expandable_segments:True"),
    ],
)
def test_what_sleep_does_not_support_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_sleep({name: value})
    assert raised.value.found == f"{name}={value}"


def test_other_settings_do_not_matter() -> None:
    check_sleep({})
    check_sleep({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"})
