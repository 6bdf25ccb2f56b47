from anthropic import Anthropic

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"name": "multiply", "description": "Multiplies.", "input_schema": NUMBERS}]


def run(task, base_url, api_key):
    client = Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    messages = [{"role": "user", "content": task["prompt"]}]
    while True:
        reply = client.messages.create(model="policy", max_tokens=1024, messages=messages, tools=TOOLS)
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return float(task["answer"] in reply.content[0].text)
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(call.input["a"] * call.input["b"])} for call in calls
        ]
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
