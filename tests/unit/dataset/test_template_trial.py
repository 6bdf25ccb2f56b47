"""Chat templates that need too much end their trial, and nothing else."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from polyreme.config.data import DataConfig
from polyreme.dataset.template_trial import try_template
from polyreme.errors import ConfigError
from polyreme_trainer.data.template import Template
from support import chat_templates

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(s='ab') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}"
WRITER = "{% for a in range(99999) %}{{ messages[0].content }}{{ 'x' * 1000 }}{% endfor %}"
TREE = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (LOOP, "processor time"),
        (TREE, "processor time"),
        (DOUBLING, "more than 512 MiB"),
        ("{{ 'a' * 10**11 }}", "more than 512 MiB"),
        ("{{ '%99999999999d' % 1 }}", "more than 512 MiB"),
        ("{% set x = 'a'.ljust(10**11) %}", "more than 512 MiB"),
        (WRITER, "characters"),
        ("{% if tools %}" + DOUBLING + "{% endif %}q", "more than 512 MiB"),
        ("{% if messages|length > 3 %}" + DOUBLING + "{% endif %}q", "more than 512 MiB"),
    ],
)
def test_a_template_without_bound_ends_its_trial_alone(template: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        try_template(template, {})


@pytest.mark.parametrize(
    "template", [*chat_templates.TEMPLATES.values(), "{% generation %}q{% endgeneration %}", "{% unknown %}"]
)
def test_a_template_of_a_model_or_a_wrong_one_passes(template: str) -> None:
    try_template(template, {"eos_token": "</s>"})


def test_nothing_renders_a_template_without_bound() -> None:
    files = chat_templates.chat_model_files("strict") | {"chat_template.jinja": DOUBLING.encode()}
    with pytest.raises(ConfigError, match="more than 512 MiB"):
        Template(files, DataConfig.model_validate({"train": "rows.jsonl", "max_prompt_tokens": 32}))


def test_it_is_tried_where_pythonpath_leads_to_the_packages() -> None:
    packages = os.pathsep.join([str(Path(__file__).parents[3]), sysconfig.get_path("purelib")])
    program = "from polyreme.dataset.template_trial import try_template; try_template('q', {})"
    python = Path(sys.base_prefix, "bin", "python3")  # as in the images: nothing of ours is in its site-packages
    subprocess.run([python, "-c", program], env={"PYTHONPATH": packages}, check=True, timeout=60)
