from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


def run(task, base_url, api_key):
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [multiply], prompt="Use the tool.")
    state = agent.invoke({"messages": [("user", task["prompt"])]})
    return float(task["answer"] in state["messages"][-1].content)
