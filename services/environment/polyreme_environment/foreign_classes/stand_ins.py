"""Stand-ins for the base classes of OpenRLHF and verl, with which a file for these systems loads where they are not installed.

Invariant: an installed package comes first. Of others, MODULES is all there is: an import of anything else raises, and names it.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict


class AgentInstanceBase:
    """OpenRLHF's base class of an environment."""

    async def reset(self, states: dict[str, object], **_: object) -> dict[str, object]:
        return states


class AgentExecutorBase:
    """OpenRLHF's loop over turns. A file may define its own, which is never made: the service plays the turns."""


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    type: str | list[str]
    description: str | None = None
    enum: list[object] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = []


class OpenAIFunctionSchema(_Schema):
    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema(type="object", properties={})
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """What a tool of verl answers."""

    text: str | None = None
    image: list[object] | None = None
    video: list[object] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """verl's base class of a tool."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(f"{type(self).__name__} has no tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return getattr(self, "tool_schema", None)

    async def create(self, instance_id: str | None = None, **_: object) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, object], **_: object
    ) -> tuple[ToolResponse, float, dict[str, object]]:
        raise NotImplementedError(f"{type(self).__name__}.execute")

    async def calc_reward(self, instance_id: str, **_: object) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: object) -> None: ...


def _traced(function: object) -> object:
    """verl's decorator of what it traces. Nothing is traced here."""
    return function


_SCHEMAS = (
    OpenAIFunctionPropertySchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
_named = {kind.__name__: kind for kind in _SCHEMAS}
MODULES: dict[str, dict[str, Any]] = {
    "openrlhf.utils.agent": {
        "AgentInstanceBase": AgentInstanceBase,
        "AgentExecutorBase": AgentExecutorBase,
        "MultiTurnAgentExecutor": AgentExecutorBase,
    },
    "verl.tools.base_tool": {"BaseTool": BaseTool},
    "verl.tools.schemas": _named,
    "verl.utils.rollout_trace": {"rollout_trace_op": _traced},
}
"""The names of each module."""
_PACKAGES = frozenset(name.partition(".")[0] for name in MODULES)


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of packages that nobody else has found."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package = name.partition(".")[0]
        found = sys.modules.get(package)
        if package not in _PACKAGES or (found is not None and getattr(found, "__loader__", None) is not self):
            return None
        if not any(f"{module}.".startswith(f"{name}.") for module in MODULES):
            raise ModuleNotFoundError(f"no {name}: {package} is not installed, and {_offered(package)}")
        return ModuleSpec(name, self, is_package=name not in MODULES)

    def exec_module(self, module: ModuleType) -> None:
        name, package = module.__name__, module.__name__.partition(".")[0]

        def missing(attribute: str) -> object:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            raise ImportError(f"no {attribute} in {name}: {package} is not installed, and {_offered(package)}", name=name)

        if name in MODULES:
            vars(module).update(MODULES[name], __getattr__=missing)


def _offered(package: str) -> str:
    names = [f"{module}.{each}" for module, given in MODULES.items() if module.startswith(f"{package}.") for each in given]
    return f"only {', '.join(names)} have a stand-in"


_FINDER = _Finder()


def offer_stand_ins() -> None:
    """From now on, this process finds the stand-ins."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
