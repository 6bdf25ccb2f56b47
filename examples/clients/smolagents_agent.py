from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a * b


def run(task, base_url, api_key):
    model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=api_key, tool_choice="auto")
    agent = ToolCallingAgent(tools=[multiply], model=model, max_steps=2, verbosity_level=0)
    return float(task["answer"] in str(agent.run(task["prompt"])))
