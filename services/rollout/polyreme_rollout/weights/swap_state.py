"""What a replica's engine does with its policy, as one state that changes in one place.

```
 EMPTY or SERVING -- devices are left --> PAUSED -- resumed, with the weights kept --> SERVING, or EMPTY if nothing was served
        |                                   |
      commit                   commit, or resumed without the weights
        +-----------------------------------+--> LOADING -- loaded --> CHECKING -- canary passed, or none --> SERVING
                                                    |                     |
                                                    |                     +-- canary failed --> EMPTY
                                                    +-- no version could be loaded --> EMPTY
```

A load that ends after the grant of the devices stays LOADING, until a later commit or resume loads again. So does CHECKING lead
back to LOADING when a resume was cancelled. A dead engine leads from LOADING and CHECKING to EMPTY.
"""

import asyncio
from enum import Enum


class SwapState(Enum):
    EMPTY = "nothing is served, and calls are refused"
    SERVING = "the engine samples the served version, and its tokens are delivered"
    PAUSED = "nothing is sampled; the engine holds the served version, if any"
    LOADING = "nothing is sampled; the engine's weights are being replaced, or are not those of the served version"
    CHECKING = "the engine samples the loaded version; its tokens wait for the canary"

    @property
    def steady(self) -> bool:
        """Whether no swap is running: tokens that are sampled now may be delivered."""
        return self in (SwapState.EMPTY, SwapState.SERVING)

    @property
    def admits(self) -> bool:
        """Whether requests may be submitted to the engine."""
        return self.steady or self is SwapState.CHECKING


TRANSITIONS: dict[SwapState, frozenset[SwapState]] = {
    SwapState.EMPTY: frozenset({SwapState.LOADING, SwapState.PAUSED}),
    SwapState.SERVING: frozenset({SwapState.LOADING, SwapState.PAUSED}),
    SwapState.PAUSED: frozenset({SwapState.LOADING, SwapState.SERVING, SwapState.EMPTY}),
    SwapState.LOADING: frozenset({SwapState.LOADING, SwapState.CHECKING, SwapState.EMPTY}),
    SwapState.CHECKING: frozenset({SwapState.SERVING, SwapState.EMPTY, SwapState.LOADING}),
}


class SwapPhase:
    """The current state of one replica, and the waits for another one. Starts EMPTY. Runs on one event loop."""

    def __init__(self) -> None:
        self.state = SwapState.EMPTY
        self._changed = asyncio.Event()

    def enter(self, state: SwapState) -> None:
        """Changes the state and wakes every wait. Raises RuntimeError for a transition that `TRANSITIONS` does not have."""
        if state not in TRANSITIONS[self.state]:
            expected = ", ".join(sorted(allowed.name for allowed in TRANSITIONS[self.state]))
            raise RuntimeError(f"expected one of {expected} after {self.state.name}; found {state.name}")
        self.state = state
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Waits for the next transition."""
        await self._changed.wait()

    async def until_steady(self) -> None:
        """Waits for the end of a swap. Returns at once when none is running."""
        while not self.state.steady:
            await self.changed()

    async def until_admitting(self) -> None:
        """Waits until requests may be submitted. Returns at once when they may be."""
        while not self.state.admits:
            await self.changed()
