"""The section `environment`: what answers the policy, over several turns, and the resources of the environment service.

Invariant: every episode is bounded in turns, tokens and seconds.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from polyreme.config.section import Operational, Section
from polyreme.config.security import ServiceSection


class McpServer(Section):
    """A server of tools that speaks the Model Context Protocol. It is a `command`, or it has a `url`."""

    command: list[str] = Field([], description="Program and arguments of a server that speaks on its standard input and output.")
    url: str | None = Field(None, pattern=r"^https?://[^\s]+$", description="URL of a server that speaks HTTP.")

    @model_validator(mode="after")
    def _is_one_thing(self) -> "McpServer":
        if bool(self.command) == (self.url is not None):
            raise ValueError("an MCP server is a `command` or a `url`; set one of them")
        return self


class PythonLimits(Section):
    """The limits of an interpreter, beside those of a sandbox."""

    seconds: float = Field(
        10.0,
        gt=0,
        description="Maximum wall-clock seconds of a call, beyond which the interpreter ends. All calls of an answer share 0.8 x"
        " step_timeout.",
    )
    memory_mib: int = Field(256, ge=32, description="Data memory of an interpreter, in MiB. Each episode may have one.")
    output_bytes: int = Field(
        8192,
        ge=256,
        description="Maximum bytes of a call's output that the policy sees: half from its beginning, half from its end.",
    )
    unsafe: bool = Field(
        False, description="Run code without a sandbox when none works, instead of refusing to start. Only for trusted models."
    )


class PythonTool(Section):
    """The tool `python` with limits of its own."""

    python: PythonLimits = Field(description="A Python interpreter in a sandbox, for each episode.")


class OnlineConfig(Section):
    """Sessions of a running product, which gives their rewards when it knows them."""

    port: Operational[int] = Field(
        8450,
        ge=0,
        le=65_535,
        description="HTTP port of the session address of the server that `polyreme up` starts. 0: a free one.",
    )
    url: Operational[str | None] = Field(
        None,
        pattern=r"^https?://[^\s/]+(/[^\s]*[^\s/])?$",
        description="URL by which products reach the session address, if a proxy changes it, such as"
        " https://sessions.example.org. null: the one by which they open sessions.",
    )
    key_env: str = Field(
        "POLYREME_ONLINE_KEY",
        description="Environment variable with the key by which the product opens sessions. `polyreme up` makes one in"
        " RUN_DIR/online/key if it is not set.",
    )
    max_sessions: Operational[int] = Field(
        4096,
        ge=1,
        description="Maximum number of sessions that are kept: open, waiting for a reward, or for others of their task.",
    )
    overflow: Operational[Literal["refuse", "serve"]] = Field(
        "refuse", description="Beyond max_sessions: refuse to open a session, or serve it without keeping anything of it."
    )
    max_age: Operational[float] = Field(
        86_400.0,
        gt=0,
        description="Maximum seconds from a session's last turn to its reward, and from its reward to that of the last session"
        " of its group.",
    )
    max_wait: Operational[float] = Field(
        86_400.0,
        gt=0,
        description="Maximum seconds without enough complete groups for an iteration. Then the run saves and stops.",
    )


class EnvironmentConfig(ServiceSection):
    file: Path | None = Field(
        None, description="Python file with a class that has `reset`, and `step` or tools, or with an agent's function."
    )
    name: str | None = Field(None, description="Name of the class in `file`. Required when there are several.")
    function: str | None = Field(
        None, description="Name of an agent's function in `file`: it gets a task, a base URL and an API key, and samples by them."
    )
    url: str | None = Field(
        None, pattern=r"^https?://[^\s]+$", description="URL of an agent in place of `file`. It gets the same by POST, as JSON."
    )
    openenv: list[Annotated[str, Field(pattern=r"^https?://[^\s]+$")]] = Field(
        [], description="URL of an OpenEnv server in place of `file`, or a list of several with the same environment."
    )
    action: dict[str, object] | None = Field(
        None,
        description="`openenv`: the action of an answer without a tool call, such as `{guess: $text}`, where `$text` is the"
        " answer. Default: the only field.",
    )
    observation: str | None = Field(
        None,
        description="`openenv`: the field of the observation that the policy sees, such as `hint` or `metadata.question`."
        " Default: all of them.",
    )
    verifiers: str | None = Field(
        None,
        min_length=1,
        description="Id of an environment of verifiers in place of `file`: a package that is installed in `venv`.",
    )
    tools: list[Literal["calculator", "python"] | PythonTool | McpServer | Path] = Field(
        [],
        description="Tools for the run's data, in place of an environment: `calculator`, `python` (with limits `{python:"
        " {seconds: 5}}`), Python files whose public functions are tools, and MCP servers as `{command: [...]}` or `{url: ...}`."
        " The section `reward` scores the last answer.",
    )
    nemo_gym: str | None = Field(
        None,
        min_length=1,
        description="Configuration file of an environment of NeMo Gym in place of `file`, with its resources server and agent: a"
        " path below the package's folder in `venv`, or an absolute one.",
    )
    venv: Path | None = Field(
        None, description="`verifiers`, `nemo_gym`: folder of the virtual environment that has the package."
    )
    online: OnlineConfig | None = Field(
        None, description="Sessions that a running product opens, in place of `file`. Their groups are those of its tasks."
    )
    options: dict[str, object] = Field(
        {},
        description="Arguments of the class, or further ones of the function. `openenv`: fields of `reset`, where `$NAME` is"
        " that column of the row. `verifiers`: the environment's configuration. `nemo_gym`: settings of its agent.",
    )
    tool_parser: Literal["hermes", "llama3_json"] = Field(
        "hermes",
        description="How the model writes a call of a tool, by vLLM's name: `hermes` for the JSON in `<tool_call>` tags of"
        " Qwen2.5, Qwen3 and Hermes.",
    )
    correctness: bool = Field(
        False,
        description="Whether an episode's reward is 1 for a success and 0 for a failure: evaluations then have accuracy and"
        " pass@k.",
    )
    max_turns: int = Field(16, ge=1, description="Maximum number of turns of an episode.")
    parallel_turns: int = Field(
        16,
        ge=1,
        description="Maximum number of turns of an agent's episode that are sampled at the same time. More requests wait.",
    )
    max_seconds: float = Field(600.0, gt=0, description="Maximum wall-clock seconds of an episode; `online`: of one answer.")
    step_timeout: float = Field(
        30.0,
        gt=0,
        description="Maximum seconds of one call of `reset` or `step`; of an agent, from a bound of its episode to its reward.",
    )
    max_message_chars: int = Field(
        65_536,
        ge=1,
        description="Maximum characters that one call may return, or that an agent may add in one request. Longer results of"
        " tools are cut.",
    )
    tries: int = Field(
        3, ge=1, description="How often an episode may begin, when its server or process is lost, in an attempt at a group."
    )
    episodes: Operational[int] = Field(256, ge=1, description="Maximum number of episodes that a server plays at once.")
    workers: Operational[int] = Field(1, ge=1, description="Worker processes of a server, which share its episodes.")
    worker_calls: Operational[int] = Field(
        64,
        ge=1,
        description="Maximum number of calls that a worker process makes at once, of different episodes of a class: coroutines"
        " as tasks of one event loop, other methods in a thread of their episode. 1: one after the other in the main thread.",
    )
    start_timeout: Operational[float] = Field(
        60.0, gt=0, description="Maximum seconds for loading the environment, and without any server."
    )

    @field_validator("openenv", mode="before")
    @classmethod
    def _as_list(cls, given: object) -> object:
        return [given] if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_one_thing(self) -> "EnvironmentConfig":
        if sum(map(bool, (self.file, self.url, self.openenv, self.verifiers, self.nemo_gym, self.tools, self.online))) != 1:
            raise ValueError(
                "an environment is a `file`, an agent's `url`, `openenv`, `verifiers`, `nemo_gym`, `tools` or `online`; set one"
                " of them"
            )
        if (self.verifiers is None and self.nemo_gym is None) != (self.venv is None):
            raise ValueError("`verifiers` and `nemo_gym` need a `venv`, and nothing else has one")
        if not self.openenv and (given := [key for key in ("action", "observation") if getattr(self, key) is not None]):
            raise ValueError(f"`{given[0]}` belongs to `openenv`; remove it")
        if self.file is None and self.url is None and (given := [key for key in ("name", "function") if getattr(self, key)]):
            raise ValueError(f"`{given[0]}` belongs to a `file`; remove it")
        if self.name is not None and self.function is not None:
            raise ValueError("`name` is for a class and `function` for an agent; set one of the two")
        alone = next((key for key in ("tools", "online") if getattr(self, key)), None)
        if alone and (given := [key for key in ("options", "correctness") if getattr(self, key)]):
            raise ValueError(f"`{given[0]}` does not go with `{alone}`; remove it")
        if self.url is not None and (given := [key for key in ("name", "function", "options") if getattr(self, key)]):
            raise ValueError(f"`{given[0]}` belongs to a `file`; remove it, since `url` names another program")
        return self

    @property
    def is_agent(self) -> bool:
        """Whether the episodes are those of an agent, which asks for turns over HTTP and gives its reward at the end."""
        return any(each is not None for each in (self.function, self.url, self.verifiers, self.nemo_gym, self.online))
