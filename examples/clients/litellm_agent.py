import json

import litellm

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "multiply", "parameters": NUMBERS}}]


def run(task, base_url, api_key):
    messages = [{"role": "user", "content": task["prompt"]}]
    while True:
        reply = litellm.completion(model="hosted_vllm/policy", api_base=base_url, api_key=api_key, messages=messages, tools=TOOLS)
        message = reply.choices[0].message
        if not message.tool_calls:
            return float(task["answer"] in message.content)
        messages.append(message)
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers["a"] * numbers["b"])})
