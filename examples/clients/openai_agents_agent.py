from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


async def run(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIResponsesModel(model="policy", openai_client=client)
        agent = Agent(name="calculator", instructions="Use the tool.", model=model, tools=[multiply])
        result = await Runner.run(agent, task["prompt"])
    return float(task["answer"] in result.final_output)
