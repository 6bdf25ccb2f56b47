"""An agent that plays a game with a model, by the public client of OpenAI. It knows nothing of training.

The model has three guesses to find a letter from a to g. After each one it is told whether the letter is later (>) or earlier (<) in the alphabet.
"""

from openai import OpenAI

GUESSES = 3
CLIENT = OpenAI(base_url="http://unused", api_key="unused")


def run(task, base_url, api_key):
    """Plays one game. Returns 1.0 if the model finds the letter, otherwise 0.0."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": "guess"}]
    for _ in range(GUESSES):
        answer = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        if answer.content == task["answer"]:
            return 1.0
        hint = ">" if answer.content < task["answer"] else "<"
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": hint}]
    return 0.0
