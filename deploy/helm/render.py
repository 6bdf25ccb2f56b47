"""Prints the chart's objects as `helm template` would, without Helm: `render.py [cuda] [nodes] [sentinel] [FILE.yaml] ...`.

Each argument is a preset or a file with values; later ones take precedence. Needs the packages helm-python-sdk and pyyaml.
"""

import sys
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parent / "polyreme"
PRESETS = {path.stem: path for path in sorted((CHART / "presets").glob("*.yaml"))}


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Both, key by key, as Helm merges values: the second takes precedence."""
    both = {**first, **second}
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict) and isinstance(second[key], dict):
            both[key] = merged(first[key], second[key])
    return both


def values(names: list[str]) -> dict[str, Any]:
    """The values of presets and files."""
    found: dict[str, Any] = {}
    for name in names:
        path = PRESETS.get(name, Path(name))
        if not path.is_file():
            sys.exit(f"{name}: expected one of the presets {', '.join(PRESETS)} or a YAML file")
        found = merged(found, yaml.safe_load(path.read_text()))
    return found


def objects(given: dict[str, Any], release: str = "polyreme", namespace: str = "polyreme") -> list[dict[str, Any]]:
    """The objects of the release.

    Raises:
        helm_python.HelmError: the values do not fit values.schema.json.
    """
    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(given)
        rendered = chart.render(given, name=release, namespace=namespace)
    texts = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


if __name__ == "__main__":
    yaml.safe_dump_all(objects(values(sys.argv[1:])), sys.stdout, sort_keys=False, width=140)
