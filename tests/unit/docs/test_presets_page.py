"""The table in docs/algorithms.md equals the presets in the code."""

from pathlib import Path

from polyreme.config.recipes.presets import PRESETS
from polyreme.config.recipes.recipe import Primitive, Recipe

PAGE = Path(__file__).parents[3] / "docs" / "algorithms.md"


def primitive(part: Primitive) -> str:
    """Its kind, and the differences from the kind's defaults."""
    changed = {name: value for name, value in part if name != "kind" and value != type(part).model_fields[name].default}
    kind = [f"`{part.kind}`"] if hasattr(part, "kind") else []
    return " ".join([*kind, ", ".join(f"{name} {show(value)}" for name, value in changed.items())]).strip()


def show(value: object) -> str:
    return (
        f"({primitive(value) or 'defaults'})"
        if isinstance(value, Primitive)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def row(name: str, recipe: Recipe) -> str:
    kl = "none" if recipe.kl is None else f"{recipe.kl.estimator} in the {recipe.kl.place}, {recipe.kl.coef:g}"
    rest = {key: getattr(recipe, key) for key in ("anchor", "shaping", "entropy_coef", "teacher_coef", "dynamic_sampling")}
    others = [
        key if value is True else f"{key} {show(value)}"
        for key, value in rest.items()
        if value != Recipe.model_fields[key].default
    ]
    parts = (f"`{name}`", primitive(recipe.advantage), primitive(recipe.loss), recipe.aggregation, kl, "; ".join(others))
    return f"| {' | '.join(parts)} |"


def test_the_table_is_current() -> None:
    expected = [row(name, recipe) for name, recipe in PRESETS.items()]
    found = [line for line in PAGE.read_text().splitlines() if line in expected]
    assert found == expected, "the table's rows are:\n" + "\n".join(expected)
