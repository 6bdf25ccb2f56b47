"""verl's runs of several turns: tools, interactions and agent loops.

Keys and bounds: verl/experimental/agent_loop/tool_agent_loop.py, verl/workers/config/rollout.py.

Invariant: pure functions of the values, and the fate of each key.
"""

from polyreme.import_config.environments import CLASS, PLACEHOLDER
from polyreme.import_config.rules import ForeignEnvironment, Values, idle, lost, part_of
from polyreme.import_config.verl.actor_keys import ROLLOUT

TURNS = f"{ROLLOUT}.multi_turn"
CODE = (
    f"{TURNS}.tool_config_path",
    f"{TURNS}.interaction_config_path",
    f"{TURNS}.function_tool_path",
    f"{ROLLOUT}.agent.agent_loop_config_path",
    "data.tool_config_path",
    "data.function_tool_path",
)
"""Keys with the files that say what answers to the policy."""
LOOP, ENABLED = f"{ROLLOUT}.agent.default_agent_loop", f"{TURNS}.enable"
BOUNDS = (f"{TURNS}.max_assistant_turns", f"{TURNS}.max_user_turns", f"{TURNS}.max_turns")


def environment(values: Values) -> ForeignEnvironment | None:
    """The environment of a run with several turns; None: a run of one answer per prompt."""
    files = [key for key in CODE if values.get(key)]
    several = values.get(ENABLED) is not False and any((values.get(key) or 1) > 1 for key in BOUNDS)
    asked = values.get(ENABLED) or several or values.get(LOOP, "single_turn_agent") not in (None, "single_turn_agent")
    if not files and not asked:
        return None
    key = next(each for each in (*files, ENABLED, *BOUNDS, LOOP) if values.get(each))
    origin = ", ".join(f"{each}: {values[each]}" for each in files) or f"{key}, without a file of tools or interactions"
    bound, why = _turns(values)
    return ForeignEnvironment(
        file=PLACEHOLDER,
        origin=origin,
        turns=bound,
        turns_origin=why,
        key=key,
        value=values.get(key),
        loss=f"several turns: write its tools or interactions as {CLASS}",
        tokens=values["data.max_prompt_length"] + values["data.max_response_length"],
    )


def _turns(values: Values) -> tuple[int | None, str]:
    """Answers of an episode. verl ends after an answer if there are as many answers, or as many messages of the user or tools."""
    answers, messages = values.get(BOUNDS[0]) or values.get(BOUNDS[2]), values.get(BOUNDS[1])
    bounds: list[int | None] = [answers, messages and messages + 1]
    given = [bound for bound in bounds if bound]
    return (min(given) if given else None), "max_assistant_turns, and max_user_turns + 1"


def _off(values: Values) -> str:
    return "" if environment(values) else "only used with several turns"


MULTI_TURNS = (
    *part_of("environment.file", ENABLED, LOOP, *CODE),
    *part_of("environment.max_turns", *BOUNDS),
    *lost("a longer message is a failure here (environment.max_message_chars): cut it in the environment",
          f"{TURNS}.max_tool_response_length", f"{TURNS}.tool_response_truncate_side", off=_off),
    *lost("the environment reads the calls in an answer, and answers them", f"{TURNS}.format", f"{TURNS}.max_parallel_calls",
          off=_off),
    *idle("checks of the tokens, which are never encoded again here", f"{TURNS}.tokenization_sanity_check_mode",
          f"{TURNS}.use_inference_chat_template"),
    *idle("evaluation only", f"{TURNS}.num_repeat_rollouts"),
    *lost("write it into the environment", f"{TURNS}.*", off=_off),
)  # fmt: skip
