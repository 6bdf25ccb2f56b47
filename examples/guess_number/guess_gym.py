"""The game as a resources server of NeMo Gym. Only this program needs the package, in an environment of its own."""

from typing import Any

from guess import GuessNumber
from pydantic import Field
from resources_servers.gymnasium import GymnasiumServer, extract_text


class GuessServer(GymnasiumServer):
    ray_enabled = False
    games: dict[str, Any] = Field(default_factory=dict)

    async def reset(self, metadata: dict[str, Any], session_id: str | None = None) -> tuple[str | None, dict[str, Any]]:
        game = self.games[session_id or ""] = GuessNumber()
        game.reset({"answer": metadata["answer"]}, 0)
        return None, {}

    async def step(
        self, action: Any, metadata: dict[str, Any], session_id: str | None = None
    ) -> tuple[str | None, float, bool, bool, dict[str, Any]]:
        hint, reward, done = self.games[session_id or ""].step(extract_text(action))
        return hint, reward, done, False, {}

    def _cleanup_session(self, session_id: str | None) -> None:
        self.games.pop(session_id or "", None)
        super()._cleanup_session(session_id)


if __name__ == "__main__":
    GuessServer.run_webserver()
