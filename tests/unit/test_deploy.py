"""Checks of the deployment files without a Docker daemon or a cluster; .ci/deploy runs the real stack."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from polyreme.config.environment import EnvironmentConfig
from polyreme.isolation.sandbox.program import Limits
from polyreme.rundir.progress import SPLIT

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
OURS = ["reward", "rollout", "trainer"]
DOCKERFILES = {name: (ROOT / "deploy" / "docker" / f"{name}.Dockerfile").read_text() for name in OURS}
KEYS = {"POLYREME_ONLINE_KEY", "POLYREME_SERVE_KEY", "POLYREME_SESSION_KEY", "POLYREME_SESSION_TOKEN"}
SECRETS = {"POLYREME_REDIS_PASSWORD", "POLYREME_TOKEN", "POLYREME_GRAFANA_PASSWORD", *KEYS}


def variables() -> dict[str, str | None]:
    """The variables of the compose file with their defaults; None: required."""
    found = re.findall(r"(?<!\$)\$\{(\w+)(?::(-|\?)([^}]*))?\}", COMPOSE)
    return {name: default if kind == "-" else None for name, kind, default in found}


def example() -> dict[str, tuple[str, bool]]:
    """The variables of .env.example: value, and whether it is commented out."""
    lines = (ROOT / ".env.example").read_text().splitlines()
    found = [re.fullmatch(r"(#?)([A-Z_]+)=(.*)", line) for line in lines]
    return {match[2]: (match[3], match[1] == "#") for match in found if match}


def test_env_example_names_every_variable_with_its_default() -> None:
    known = example()
    assert known.keys() - {"COMPOSE_PROFILES"} == variables().keys()
    for name, default in variables().items():
        value, commented = known[name]
        if name in SECRETS:
            assert (value, commented, default) == ("", False, "" if name in KEYS else None), f"{name} has a default"
        else:
            assert commented, name
            alternatives = {
                "POLYREME_TLS",
                "POLYREME_CERTIFICATE",
                "POLYREME_KEY",
                "POLYREME_SECURITY",
                "POLYREME_SERVE_SECURITY",
            }
            assert value == default or name in alternatives, name


def test_services_that_scale_have_no_name_or_port_of_the_host() -> None:
    for name, service in SERVICES.items():
        assert "container_name" not in service
        for port in service.get("ports", []):
            assert port.startswith("${POLYREME_BIND:-127.0.0.1}:"), name
    assert {name for name, service in SERVICES.items() if service.get("ports")} == {
        *("redis", "grafana", "gateway", "online", "serve-api", "serve-agents")
    }


def test_every_service_is_watched_restarted_and_given_time() -> None:
    for name, service in SERVICES.items():
        assert "restart" in service, name
        if name not in ("prepare", "prometheus", "grafana"):
            assert "stop_grace_period" in service and (
                "healthcheck" in service or name in ("serve-learner", "serve-observer", "serve-sampler", "serve-turns")
            ), name
    assert SERVICES["trainer"]["depends_on"]["redis"] == {"condition": "service_healthy"}
    flags = SERVICES["redis"]["command"][0]
    assert all(flag in flags for flag in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction"))


def test_a_card_belongs_to_one_service() -> None:
    for profile in ("cuda", "npu"):
        ours = [service for service in SERVICES.values() if service.get("profiles") == [profile]]
        cards = [device for service in ours for device in service.get("devices", []) if re.search(r"davinci\d", device)]
        for service in ours:
            reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
            cards += [card for device in reserved for card in device["device_ids"]]
        assert len(ours) == len(cards) == len(set(cards)), profile


def test_dockerfiles_share_their_first_stages_and_fetch_nothing_unasked() -> None:
    shared = {name: re.findall(r"# -- shared.*?(?=\n# -- )", text, re.S)[0] for name, text in DOCKERFILES.items()}
    assert len(set(shared.values())) == 1
    for name, text in DOCKERFILES.items():
        assert "# syntax" not in text
        assert all(image.startswith("${") or image in _stages(text) for image in re.findall(r"^FROM (\S+)", text, re.M)), name
        assert all(line.startswith("[") for line in re.findall(r"^(?:ENTRYPOINT|CMD) (.*)", text, re.M)), f"{name}: shell form"
        finals = [stage for stage in re.split(r"^(?=FROM )", text, flags=re.M) if "ENTRYPOINT" in stage]
        assert [re.findall(r" AS (\w+)", stage)[0] for stage in finals] == (
            ["reward"] if name == "reward" else ["cpu", "cuda", "npu"]
        )
        assert all(stage.rindex("USER 10001") > stage.rfind("USER root") for stage in finals), f"{name} runs as root"


def test_what_images_copy_is_there() -> None:
    for name, text in DOCKERFILES.items():
        for argument, value in re.findall(r"^ARG (\w+)=(\S+)", text, re.M):
            text = text.replace(f"${{{argument}}}", value)
        paths = [words for line in re.findall(r"^COPY (?!--from)(.*)", text, re.M) for words in line.split()[:-1]]
        assert {"polyreme", "deploy/certificates"} <= set(paths)
        assert [path for path in paths if not (ROOT / path).exists()] == [], name


def test_every_stage_that_installs_knows_where_from() -> None:
    """A build stage has only the build arguments that it declares. Without them pip uses the public index."""
    for name, text in DOCKERFILES.items():
        installing = [
            stage
            for stage in re.split(r"^(?=FROM )", text, flags=re.M)
            if re.search(r"install\.sh (requirements|packages)", stage)
        ]
        assert len(installing) >= 2
        for stage in installing:
            named = set(re.findall(r"^ARG (\w+)", stage, re.M))
            assert {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"} <= named, f"{name}: {stage.splitlines()[0]}"


def _stages(text: str) -> set[str]:
    return set(re.findall(r"^FROM \S+ AS (\S+)", text, re.M))


def test_every_image_installs_a_part_of_the_lock() -> None:
    sys.path.insert(0, str(ROOT / "requirements"))
    try:
        import images  # type: ignore[import-not-found]  # of a folder that is no package
    finally:
        sys.path.pop(0)
    for image in images.ROOTS:
        assert (ROOT / "requirements" / f"{image}.txt").read_text().splitlines() == images.lines(image), (
            f"requirements/{image}.txt is old: run python requirements/images.py"
        )
    assert not [line for line in images.lines("reward") if line.startswith(("torch", "transformers", "vllm"))]


def test_the_reward_service_may_make_sandboxes_and_little_else() -> None:
    """Its filter allows the calls that bubblewrap needs, and refuses all others that Docker's profile refuses."""
    reward = SERVICES["reward"]
    assert {"seccomp=deploy/reward-seccomp.json", "no-new-privileges=true"} <= set(reward["security_opt"])
    assert reward["cap_drop"] == ["ALL"]
    assert [name for name, service in SERVICES.items() if "seccomp" in str(service.get("security_opt"))] == ["reward"]
    profile = json.loads((ROOT / "deploy" / "reward-seccomp.json").read_text())
    refused = {name for rule in profile["syscalls"] for name in rule["names"]}
    assert {rule["action"] for rule in profile["syscalls"]} == {"SCMP_ACT_ERRNO"}
    assert not refused & {"clone", "clone3", "unshare", "mount", "umount2", "pivot_root", "prctl", "seccomp", "capset"}
    assert not [name for name in refused if name.startswith("landlock_")]
    assert {"bpf", "keyctl", "kexec_load", "perf_event_open", "io_uring_setup", "setns", "userfaultfd", "init_module"} <= refused


def test_code_of_users_starts_only_so_many_processes() -> None:
    """What the sandbox and the workers allow fits, and a loop of forks leaves the host some of its 32,768 default ids."""
    limits = {name: service["pids_limit"] for name, service in SERVICES.items() if "pids_limit" in service}
    assert limits.keys() == {"reward", "environment"}
    program, own = Limits(seconds=1, memory_mib=1).threads + 3, 256
    assert 64 * program + own <= limits["reward"]
    assert EnvironmentConfig.model_fields["episodes"].default * (program + 1) + own <= limits["environment"] <= 20_000


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed; .ci/deploy installs it")
def test_compose_takes_the_file_and_starts_nothing_without_secrets(tmp_path: Path) -> None:
    def config(*arguments: str) -> "subprocess.CompletedProcess[str]":
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("POLYREME_", "COMPOSE_"))}
        command = ["docker-compose", *arguments]
        return subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300, check=False)

    refused = config("--env-file", ".env.example", "config")
    assert refused.returncode != 0 and "make secrets" in refused.stderr
    secrets = tmp_path / "env"
    subprocess.run([ROOT / "deploy" / "secrets.sh", secrets], check=True, timeout=300)
    assert secrets.stat().st_mode & 0o077 == 0
    resolved = config("--env-file", str(secrets), "config")
    assert resolved.returncode == 0, resolved.stderr
    assert yaml.safe_load(resolved.stdout)["services"].keys() == SERVICES.keys()


def test_secrets_are_fresh_and_never_overwritten(tmp_path: Path) -> None:
    def write(name: str) -> dict[str, str]:
        subprocess.run([ROOT / "deploy" / "secrets.sh", tmp_path / name], check=True, timeout=300)
        lines = (tmp_path / name).read_text().splitlines()
        return {key: value for key, _, value in (line.partition("=") for line in lines) if key in SECRETS}

    first, second = write("a"), write("b")
    assert first.keys() == SECRETS and all(re.fullmatch("(tml-)?[0-9a-f]{48}", value) for value in first.values())
    assert [name for name, value in first.items() if value.startswith("tml-")] == ["POLYREME_SERVE_KEY"]
    assert not set(first.values()) & set(second.values())
    assert write("a") == first


def test_certificates_are_what_the_services_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyreme.config.security import SecurityConfig
    from polyreme.net import tls

    folder = tmp_path / "tls"
    subprocess.run([ROOT / "deploy" / "certs.sh", folder, "DNS:elsewhere"], check=True, timeout=300, capture_output=True)
    files = {"certificate": folder / "certificate.pem", "key": folder / "key.pem", "ca": folder / "ca.pem"}
    config = SecurityConfig(**files, mutual=True, server_name="polyreme")
    assert tls.server_credentials(config) is not None
    subprocess.run(["openssl", "verify", "-CAfile", files["ca"], files["certificate"]], check=True, timeout=300)
    authority = files["ca"].read_bytes()
    subprocess.run([ROOT / "deploy" / "certs.sh", folder], check=True, timeout=300, capture_output=True)
    assert files["ca"].read_bytes() == authority, "a CA is kept"


def test_a_variable_puts_the_replica_on_the_trainers_card() -> None:
    cards = {
        name: SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for name in ("trainer-cuda", "rollout-cuda-1")
    }
    assert cards == {"trainer-cuda": ["0"], "rollout-cuda-1": ["${POLYREME_ROLLOUT_CARD:-1}"]}


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    from metric_rows import METRICS
    from prometheus_client import generate_latest

    from polyreme_reward.metrics import RewardMetrics
    from polyreme_rollout.metrics import ReplicaMetrics as RolloutMetrics

    board = json.loads((ROOT / "deploy" / "observability" / "dashboards" / "polyreme.json").read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"polyreme_[a-z_]+", target["expr"])
    }
    there = generate_latest(RolloutMetrics().registry).decode() + generate_latest(RewardMetrics().registry).decode()
    known = set(re.findall(r"^(?:# TYPE )?(polyreme_\w+)", there, re.M))
    known |= {name + "_bucket" for name in known}
    of_the_run = {name for name in asked if name.startswith("polyreme_train_")}
    assert asked - of_the_run - known == {"polyreme_device_busy_ratio", "polyreme_device_memory_bytes"}, "of devices only"
    assert {f"polyreme_train_{key.replace('/', '_')}_seconds" for key in SPLIT.values()} <= asked
    derived = {"alarms", "iteration", "learner_wait_ratio", "state"}
    recorded = {re.sub(r"\W", "_", metric.name) + ("_seconds" if metric.unit == "s" else "") for metric in METRICS}
    assert {name.removeprefix("polyreme_train_") for name in of_the_run} <= recorded | derived


def test_the_sbom_fits_its_standard() -> None:
    """The script of deploy/images.sh, here with this environment's packages, against the schema of CycloneDX 1.6."""
    from jsonschema import Draft7Validator  # type: ignore[import-untyped]
    from referencing import Registry, Resource

    (folder,) = importlib.util.find_spec("cyclonedx").submodule_search_locations  # type: ignore[union-attr, misc]
    found = {path.name: json.loads(path.read_text()) for path in Path(folder).glob("schema/_res/*.schema.json")}
    registry = Registry().with_resources((schema["$id"], Resource.from_contents(schema)) for schema in found.values())
    command = [sys.executable, str(ROOT / "deploy" / "docker" / "sbom.py"), "polyreme/reward", "0.2.0"]
    first, second = (subprocess.run(command, capture_output=True, check=True, timeout=300).stdout for _ in range(2))
    assert first == second
    bom = json.loads(first)
    Draft7Validator(found["bom-1.6.SNAPSHOT.schema.json"], registry=registry).validate(bom)
    listed = {component["name"] for component in bom["components"]}
    assert {"polyreme", "polyreme-trainer", "torch"} <= listed
    torch = next(component for component in bom["components"] if component["name"] == "torch")
    assert torch["purl"].startswith("pkg:pypi/torch@2") and "+" not in torch["purl"]


def test_shell_scripts_are_sound() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    scripts = [
        path for path in paths if path.is_file() and path.read_bytes()[:32].startswith((b"#!/bin/sh", b"#!/usr/bin/env bash"))
    ]
    assert {"node.sh", "polyreme.sbatch", "redis.sh", "images.sh"} <= {path.name for path in scripts}
    command = [str(Path(sys.executable).with_name("shellcheck")), "--severity=warning", *map(str, scripts)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert checked.returncode == 0, checked.stdout


def test_nodes_refuse_too_few_machines_and_no_secrets(tmp_path: Path) -> None:
    def start(*arguments: str, **environment: str) -> str:
        given = {"PATH": os.environ["PATH"], "CONFIG": "run.yaml", "RUNS": str(tmp_path), **environment}
        command = [str(ROOT / "deploy" / "machines" / "node.sh"), *arguments]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        return done.stderr

    assert "POLYREME_REDIS_PASSWORD: openssl rand" in start("0", "2", "127.0.0.1")
    secrets = {"POLYREME_REDIS_PASSWORD": "a", "POLYREME_TOKEN": "b"}
    assert "expected more machines than LEARNERS=2" in start("0", "2", "127.0.0.1", LEARNERS="2", **secrets)
