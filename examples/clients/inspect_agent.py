import tempfile
import threading

from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import tool

ONE = threading.Lock()


@tool
def multiply():
    async def execute(a: int, b: int) -> int:
        """Multiplies two numbers.

        Args:
            a: One.
            b: The other.
        """
        return a * b

    return execute


def run(task, base_url, api_key):
    solver = react(tools=[multiply()], submit=False)
    question = Task(dataset=[Sample(input=task["prompt"], target=task["answer"])], solver=solver, scorer=includes())
    with ONE, tempfile.TemporaryDirectory() as logs:
        model = get_model("openai-api/polyreme/policy", base_url=base_url, api_key=api_key, memoize=False)
        (log,) = eval(question, model=model, display="none", log_dir=logs)
    return float(log.results.scores[0].metrics["accuracy"].value)
