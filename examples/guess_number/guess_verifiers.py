"""The game as an environment of verifiers: its tasks, the environment, and a harness that asks the model from the env server's own process.

Only this program needs the package, in an environment of its own.
"""

import json
import urllib.request
from asyncio import to_thread
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from guess import GuessNumber


class GuessData(vf.TaskData):
    answer: str


class GuessTask(vf.Task[GuessData]):
    pass


class GuessTaskset(vf.Taskset[GuessTask, vf.TasksetConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in "123456789":
            yield GuessTask(GuessData(prompt="guess", answer=number), self.config.task)


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """Answers each guess, at most four times."""

    async def run(self, task: GuessTask, agents: Any) -> None:
        game, reward, guesses = GuessNumber(), 0.0, 0
        game.reset({"answer": task.data.answer}, 0)
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                guesses += 1
                hint, reward, done = game.step(segment.last_reply or "")
                if done or guesses == 4:
                    break
                segment = await interaction.turn(hint)
        interaction.trace.record_reward("found", reward, 1.0)
        interaction.trace.record_metric("guesses", guesses)


class GuessHarness(vf.Harness[vf.HarnessConfig]):
    """One chat completion for each of the player's turns."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            said.append({"role": "user", "content": prompt})
        else:
            said += [each.model_dump(exclude_none=True) for each in prompt]
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        body = json.dumps({"model": ctx.model, "messages": said}).encode()
        request = urllib.request.Request(f"{endpoint}/chat/completions", body, headers)

        def call() -> bytes:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return reply.read()

        await to_thread(call)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["GuessEnv", "GuessHarness", "GuessTaskset"]
