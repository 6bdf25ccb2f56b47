"""Reads the parameters of a reward function from its source text.

Invariant: the text is parsed and never run. When only running it would show the parameters, the answer is None.
"""

import ast
from collections.abc import Callable

from polyreme.config.python_source import FUNCTIONS, parse, stand_in_for
from polyreme_reward.plugins.load import USUAL_NAMES, choose_function, no_function


def stand_in(code: str, where: str, name: str | None) -> Callable[..., object] | None:
    """A function with the name and parameters of the reward function in a module's source. It must not be called.

    Args:
        code: the module's text.
        where: name of the module for errors.
        name: name of the function, or None to choose it as `load` does.

    Returns:
        The function, or None when the source does not determine it, since the name is assigned, imported, decorated or a class.

    Raises:
        ConfigError: the text is not valid Python, or it does not have the function.
    """
    bound = parse(code, where)
    public = [key for key, node in bound.items() if isinstance(node, FUNCTIONS) and not key.startswith("_")]
    if name is not None:
        if not {name, "*"} & bound.keys():
            raise no_function(name, public, where)
        chosen = name
    else:
        values = [key for key, node in bound.items() if not isinstance(node, (*FUNCTIONS, ast.Import, ast.ImportFrom))]
        if set(USUAL_NAMES) & set(values) or (values and not public):
            return None
        chosen = choose_function(public, where)
    node = bound.get(chosen)
    return stand_in_for(node) if isinstance(node, FUNCTIONS) and not node.decorator_list else None
