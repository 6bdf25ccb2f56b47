"""The game as an OpenEnv server: `python openenv_server.py 8000`. Only this program needs OpenEnv's package, in an environment of its own."""

import sys
from typing import Any

import uvicorn
from guess import GuessNumber
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    text: str


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._game, self._state = GuessNumber(), State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, answer: str = "5", **_: Any) -> Hint:
        self._game.reset({"answer": answer}, seed)
        self._state = State(episode_id=episode_id)
        return Hint()  # no hint: the row's own prompt

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        hint, reward, done = self._game.step(action.text)
        return Hint(hint=hint or "", reward=reward, done=done, metadata={"guesses": self._state.step_count})

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
