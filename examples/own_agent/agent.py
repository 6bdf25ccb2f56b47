"""An agent that works with a model by the public client of OpenAI. It knows nothing of training.

It wants a word with many vowels, and asks for another draft while there are too few, up to three times.
"""

from openai import OpenAI

DRAFTS, LENGTH, ENOUGH = 3, 6, 5
CLIENT = OpenAI(base_url="http://unused", api_key="unused")


def run(task, base_url, api_key):
    """Asks for one word. Returns its share of vowels, and the number of drafts."""
    chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
    messages = [{"role": "user", "content": task["prompt"]}]
    for draft in range(1, DRAFTS + 1):
        word = chat.create(model="policy", messages=messages).choices[0].message.content
        vowels = sum(letter in "aeiou" for letter in word[:LENGTH])
        if vowels >= ENOUGH or draft == DRAFTS:
            return {"reward": vowels / LENGTH, "metrics": {"drafts": draft}}
        messages += [{"role": "assistant", "content": word}, {"role": "user", "content": f"only {vowels}"}]
