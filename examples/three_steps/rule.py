"""The preference rule: more vowels are better. It orders the pairs and measures the policy; the reward model and PPO never see it.

Invariant: the value depends only on the answer.
"""

VOWELS = "aeiou"


def reward(response: str) -> float:
    """Returns the number of vowels among the first eight letters, divided by eight."""
    return sum(letter in VOWELS for letter in response[:8]) / 8
