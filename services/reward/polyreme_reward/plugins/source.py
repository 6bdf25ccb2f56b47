"""A reward function's parameters, read from source text.

Invariant: the text is parsed and never run. What only running it could tell is left open (None).
"""

import ast
from collections.abc import Callable
from typing import Any

from polyreme.config.python_source import FUNCTIONS, parse, stand_in_for
from polyreme_reward.plugins.load import USUAL_NAMES, choose_function, no_function


def stand_in(code: str, where: str, name: str | None) -> Callable[..., Any] | None:
    """A function of the same name and parameters as the reward function in a module's source, which does nothing.

    Args:
        code: the module's text.
        where: the module, for errors.
        name: the function's name; None: as `load` chooses one.

    Returns:
        None when the source alone does not tell: the name may be assigned, imported, decorated or a class.

    Raises:
        ConfigError: the text is no Python, or it has no such function.
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
