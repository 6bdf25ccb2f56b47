"""An agent that talks with a model by the public client of OpenAI. It knows nothing of training.

A guest orders three dishes, a letter each, one after the other. Then the model must write the bill: all dishes in their order.
"""

from openai import OpenAI

CLIENT = OpenAI(base_url="http://unused", api_key="unused")


def run(task, base_url, api_key):
    """Takes one order. Returns the share of the bill that is right."""
    chat = CLIENT.with_options(base_url=base_url, api_key=api_key).chat.completions
    messages = []
    for words in [*task["answer"], "bill"]:
        messages.append({"role": "user", "content": words})
        answer = chat.create(model="policy", messages=messages).choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
    return sum(said == dish for said, dish in zip(answer, task["answer"], strict=False)) / len(task["answer"])
