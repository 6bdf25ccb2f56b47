"""Runs of several turns: another system's agents, tools and environments as our section `environment`.

Invariant: what our environments cannot have (a reward service, a prompt without the chat template) is taken out and said.
"""

from polyreme.import_config.application import Entry, Imported
from polyreme.import_config.rules import LOSSES, Fate, ForeignEnvironment

PLACEHOLDER = "FILL_IN/environment.py"
"""The file of an environment that the user must write: the run does not start without it."""
CLASS = (
    "a class with `reset` and `step`, which gives the rewards; `polyreme init FOLDER --environment` writes an example"
    " (docs/environments.md)"
)
TAKEN = "an `AgentInstance` is played as it is, an executor with a loop of its own is not (docs/environments.md)"
_BRIEFEST = 3
"""Tokens of the briefest turn, if tokens alone bound an episode: the answer, its end and the next message."""
_WITHOUT = {
    "rollout.tokens_per_iteration": "with an environment it counts all turns of an episode",
    "trainer.moe.replay_routes": "an environment's own tokens have no reported routes",
}


def play(found: Imported, environment: ForeignEnvironment | None) -> None:
    """Makes a run of one answer per prompt one of several turns; `found` is changed. None: it stays as it is."""
    if environment is None:
        return
    for key in [key for key in found.values if key == "reward" or key.startswith("reward.")]:
        value = _drop(found, key)
        found.lost.append(Entry(key, value, "", None, "the environment gives the rewards: compute them in it", Fate.LOST))
    for key, why in _WITHOUT.items():
        if found.values.get(key):
            value = _drop(found, key)
            found.lost.append(Entry(key, value, "", None, why, Fate.LOST))
    if found.values.get("data.template", "chat") != "chat":
        value = _drop(found, "data.template")
        found.lost.append(Entry("data.template", value, "", None, "an episode is a conversation in the chat template", Fate.LOST))
    if environment.tokens:
        found.values["rollout.max_model_len"] = environment.tokens
        found.comments["rollout.max_model_len"] = (
            "prompt and conversation: the limit of a response counts all turns in the original"
        )
    turns, origin = environment.turns, environment.turns_origin
    if turns is None:
        turns = max(1, int(found.values.get("rollout.max_model_len", 4096)) // _BRIEFEST)
        origin = f"no {origin}: tokens alone bound an episode (rollout.max_model_len)"
    is_missing = environment.file == PLACEHOLDER
    check = f"CHECK: {environment.origin}; {f'write this file: {CLASS}' if is_missing else TAKEN}"
    for key, value, comment in (
        ("reward", None, "the environment gives the rewards"),
        ("environment.file", environment.file, check),
        ("environment.max_turns", turns, origin),
    ):
        found.values[key], found.comments[key] = value, comment
    found.lost.append(Entry(environment.key, environment.value, "", None, environment.loss, Fate.ANOTHER_RUN))
    found.lost.sort(key=lambda entry: LOSSES.index(entry.fate))


def _drop(found: Imported, key: str) -> object:
    del found.comments[key]
    return found.values.pop(key)
