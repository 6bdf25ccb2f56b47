"""The trainer's part of `polyreme doctor`: packages, devices, and a collective over the devices of this machine.

Invariant: only child processes load torch, each with a deadline, so a broken driver becomes a verdict and not a hang.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.process.supervisor import last_error
from polyreme.terminal.verdicts import Verdict, installed_version, packages_verdict
from polyreme_trainer.launch.ranks import local_rendezvous
from polyreme_trainer.megatron.mindspeed import Choice, choice

SECONDS = 120.0
"""Deadline of a child process."""
DRIVERS = {"cuda": Path("/proc/driver/nvidia/version"), "npu": Path("/usr/local/Ascend/driver/version.info")}
"""The files in which drivers name their version."""
_MODULE = "polyreme_trainer.megatron.probes.self_test"


def verdicts(wanted: str | None) -> Iterator[Verdict]:
    """Checks whether this machine can run a learner.

    Args:
        wanted: "cpu", "cuda" or "npu"; None: the machine's device.
    """
    versions = {name: installed_version(name) for name in ("torch", "megatron-core", "transformers")}
    if wanted == "npu":
        versions["torch-npu"] = installed_version("torch-npu")
    device = wanted or "cpu"
    yield packages_verdict("trainer", versions, f"Install requirements/{device}.txt, or use the {device} image.")
    if versions["torch"] is None:
        return
    yield from optimizer_verdicts({name: installed_version(name) for name in ("transformer-engine", "apex")})
    answers, failure = _children(["facts"])
    if failure is not None:
        yield Verdict("missing", "devices", failure, "Run `python -c 'import torch'`, and install the packages again.")
        return
    kind, verdict = device_verdict(wanted, answers[0])
    yield verdict
    if (accelerator := kind or device) in DRIVERS:
        path = DRIVERS[accelerator]
        yield driver_verdict(accelerator, path.read_text(errors="replace") if path.is_file() else None)
    if accelerator == "npu" and versions["megatron-core"] and (kind or installed_version("mindspeed")):
        yield mindspeed_verdict(choice())
    if kind is not None:
        ranks = 2 if kind == "cpu" else len(answers[0][kind])
        yield collective_verdict(kind, ranks, _children([kind], ranks)[1])


def optimizer_verdicts(versions: Mapping[str, str | None]) -> Iterator[Verdict]:
    """A verdict on each installed package whose Adam megatron-core would use instead of torch's; a learner refuses it."""
    for name, version in versions.items():
        if version is not None:
            yield Verdict(
                "missing", "optimizer", f"{name} {version}, whose Adam checkpoints cannot hold", f"pip uninstall {name}"
            )


def device_verdict(wanted: str | None, facts: Mapping[str, Any]) -> tuple[str | None, Verdict]:
    """Returns the device that a learner would use (None when the wanted one is missing) and the verdict.

    Args:
        facts: as `self_test.facts` reports them.
    """
    kind = wanted or next((name for name in ("cuda", "npu") if facts[name]), "cpu")
    torch = f"torch {facts['torch']}"
    if kind == "cpu":
        return "cpu", Verdict("ok", "devices", f"none but the processor, {torch}" if not wanted else f"cpu, {torch}")
    if names := facts[kind]:
        each = ", ".join(f"{names.count(name)} x {name}" for name in sorted(set(names)))
        return kind, Verdict("ok", "devices", f"{kind}: {each}, {torch}")
    return None, Verdict("missing", "devices", f"no {kind}, {torch}", _advice(kind, facts))


def driver_verdict(kind: str, text: str | None) -> Verdict:
    """The version of an accelerator's driver. text: the content of its file in DRIVERS; None: the file does not exist."""
    found = re.search(r"\b\d+\.\d+(\.[\w.]+)?", text or "")
    if found is not None:
        return Verdict("ok", "driver", f"{kind} {found.group()}")
    what = "no file" if text is None else "no version"
    advice = {
        "cuda": "Install NVIDIA's driver; `nvidia-smi` names it and the newest CUDA that it supports.",
        "npu": "Install Ascend's driver; a container needs /usr/local/Ascend/driver/version.info of its host, read-only.",
    }[kind]
    return Verdict("note", "driver", f"{kind}: {what} at {DRIVERS[kind]}", advice)


def mindspeed_verdict(made: Choice) -> Verdict:
    """Whether a learner uses MindSpeed's adaptor, and which one."""
    return Verdict("note" if made.do else "ok", "mindspeed", made.found, made.do)


def _advice(kind: str, facts: Mapping[str, object]) -> str:
    if kind == "npu":
        return "Install torch_npu, source CANN's set_env.sh, and check `npu-smi info` (docs/ascend.md)."
    if facts["cuda_build"] is None:
        return "This torch has no CUDA: install requirements/cuda.txt, or use the cuda image (docs/cuda.md)."
    return "Check `nvidia-smi`: install the driver, or give the container its devices (docs/cuda.md)."


def collective_verdict(kind: str, ranks: int, failure: str | None) -> Verdict:
    """Checks that the devices can sum a tensor collectively. failure: the reason why they cannot; None when they can."""
    found = f"sum over {ranks} {kind} rank(s)"
    if failure is None:
        return Verdict("ok", "collectives", found)
    advice = {
        "cpu": "Check that processes can connect to 127.0.0.1.",
        "cuda": "Set NCCL_DEBUG=INFO and run it again; in a container, enlarge /dev/shm.",
        "npu": "Check `npu-smi info` and HCCL_IF_IP, and that no other process uses the devices.",
    }[kind]
    return Verdict("missing", "collectives", f"{found}: {failure}", advice)


def _children(
    arguments: Sequence[str], ranks: int = 1, module: str = _MODULE, seconds: float = SECONDS
) -> tuple[list[dict[str, Any]], str | None]:
    """Runs `ranks` processes of the self-test. Returns their answers, and the reason why one failed (None when none failed)."""
    shared = {**os.environ, **local_rendezvous(), "WORLD_SIZE": str(ranks)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [child.communicate(timeout=seconds) for child in children]
    except subprocess.TimeoutExpired:
        return [], f"no answer within {seconds:g} s"
    finally:
        for child in children:
            with child:  # closes its pipes, and waits for its end
                child.kill()
    for child, (_, errors) in zip(children, outputs, strict=True):
        if child.returncode:
            return [], last_error(errors)[:300] or f"exit code {child.returncode}"
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs], None
