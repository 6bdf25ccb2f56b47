"""The servers of an environment of NeMo Gym, from its own configuration file: which processes they are, and what each is told.

Invariant: every process has the same configuration, in which the policy is a session address. Pure, but for reading the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from polyreme.errors import ConfigError

_KINDS = ("resources_servers", "responses_api_agents")
POLICY = "policy_model"
_UNREAD = ("_inherit_from", "config_paths", "${")
"""What refers to other files or values, which are not read."""


@dataclass(frozen=True)
class GymServer:
    """A process: its name in the configuration, its program, and its port on loopback.

    A program of the package's is a path below its folder; another one, below that of the configuration file.
    """

    name: str
    program: str
    port: int


@dataclass(frozen=True)
class GymPlan:
    """All of them, what each is told, and the port of the agent that runs the episodes."""

    servers: list[GymServer]
    told: dict[str, Any]
    agent_port: int


def site_packages(venv: Path) -> Path:
    """The folder of a virtual environment's packages. Raises ConfigError."""
    found = sorted(venv.glob("lib/python*/site-packages/nemo_gym"))
    if not found:
        raise ConfigError(f"a virtual environment with NeMo Gym at {venv}", "none", "Fix environment.venv.")
    return found[0].parent


def read_file(site: Path, name: str) -> dict[str, object]:
    """A configuration file, by its path or the one below the package's folder. Raises ConfigError."""
    path = Path(name) if Path(name).is_absolute() else site / name
    try:
        text = path.read_text()
        tree = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"a configuration file of NeMo Gym at {path}", str(error), "Fix environment.nemo_gym.") from None
    if found := [each for each in _UNREAD if each in text]:
        raise ConfigError(
            f"a configuration of NeMo Gym without {', '.join(_UNREAD)} in {path}",
            found[0],
            "Write it out, in a file of your own.",
        )
    if not isinstance(tree, dict):
        raise ConfigError(f"a configuration of NeMo Gym in {path}", f"a {type(tree).__name__}", "Fix environment.nemo_gym.")
    return tree


def program(site: Path, file: str, server: GymServer) -> Path:
    """The file of a server's program. Raises ConfigError."""
    own = Path(file).parent / Path(server.program).name
    found = next((path for path in (site / server.program, own) if path.is_file()), None)
    if found is None:
        raise ConfigError(
            f"the program of {server.name} at {site / server.program} or {own}", "none", "Fix environment.nemo_gym."
        )
    return found


def plan(
    tree: Mapping[str, object], options: Mapping[str, object], policy: tuple[str, int], scratch: str, free_port: Callable[[], int]
) -> GymPlan:
    """The processes of a configuration file.

    Args:
        tree: the file.
        options: added to the settings of its agent.
        policy: host and port of the session address.
        scratch: a folder for the processes' files.

    Raises:
        ConfigError: it has no resources server and one agent.
    """
    told: dict[str, object] = {
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "dry_run": False,
        "uv_cache_dir": scratch,
        "uv_venv_dir": scratch,
        "skip_venv_if_present": False,
        "observability_enabled": True,  # without it, an agent does not say which episode it asks for
        POLICY: {"responses_api_models": {"polyreme": {"entrypoint": "app.py", "host": policy[0], "port": policy[1]}}},
    }
    servers: list[GymServer] = []
    agents: list[int] = []
    for name, section in tree.items():
        for kind in _KINDS:
            for folder, settings in (section.get(kind) or {}).items() if isinstance(section, Mapping) else ():
                port = free_port()
                more = options if kind == "responses_api_agents" else {}
                settings = {**(settings or {}), **more, "host": "127.0.0.1", "port": port}
                told[name] = {kind: {folder: settings}}
                servers.append(GymServer(name, f"{kind}/{folder}/{settings.get('entrypoint', 'app.py')}", port))
                agents += [port] * (kind == "responses_api_agents")
    if len(agents) != 1 or len(servers) < 2:
        found = ", ".join(f"{server.name} ({server.program})" for server in servers) or "none"
        raise ConfigError("a resources server and one agent in environment.nemo_gym", found, "Choose another file, or write one.")
    return GymPlan(servers, told, agents[0])
