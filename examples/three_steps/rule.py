"""What is liked: vowels. It orders the pairs, and measures the policy; neither the reward model nor PPO ever sees it.

Invariant: the value depends on the answer alone.
"""

VOWELS = "aeiou"


def reward(response: str) -> float:
    """The number of vowels among the first eight letters, divided by eight."""
    return sum(letter in VOWELS for letter in response[:8]) / 8
