"""What runs in the virtual environment that has verifiers. Nothing of it is imported here."""

import json

from polyreme.config.environment import EnvironmentConfig

_CONFIG = """
import json, sys

def configured(text):
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    config = resolve_env_config(json.loads(text))
    for name, agent in agent_config_fields(config).items():
        if "runtime" not in agent.model_fields_set:
            sys.exit(f"expected environment.options.{name}.runtime, such as {{type: subprocess}}; \
found none, which is a cloud sandbox")
    return config
"""
SERVE = (
    _CONFIG
    + """
if __name__ == "__main__":
    from verifiers.v1.serve import env_config_data, serve_env

    serve_env(address=sys.argv[2], max_workers=int(sys.argv[3]), config_data=env_config_data(configured(sys.argv[1])))
"""
)
"""Serves an environment. Arguments: its configuration as JSON, the address, the largest number of worker processes."""
TASKS = (
    _CONFIG
    + """
if __name__ == "__main__":
    from itertools import islice
    from verifiers.v1.utils.loaders import load_taskset

    with open(sys.argv[2], "w") as out:
        for task in islice(load_taskset(configured(sys.argv[1]).taskset), int(sys.argv[3])):
            print(json.dumps(task.data.model_dump(mode="json")), file=out)
"""
)
"""Writes tasks. Arguments: the configuration as JSON, the file, the largest number of tasks."""


def configuration(config: EnvironmentConfig) -> str:
    """The configuration of the environment, as JSON."""
    taskset = config.options.get("taskset")
    chosen = taskset if isinstance(taskset, dict) else {}
    return json.dumps({**config.options, "taskset": {**chosen, "id": config.verifiers}})
