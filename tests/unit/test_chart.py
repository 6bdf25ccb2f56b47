"""The Helm chart, rendered by Helm's own library and checked against published schemas, without a cluster."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # type: ignore[import-untyped]

from polyreme.cli.main import commands
from polyreme.config.load import load_config
from polyreme.config.serve import read_serve
from polyreme.net.redis_url import split
from polyreme_trainer.service.agents.run import agents_run_id

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "polyreme"
sys.path.insert(0, str(CHART.parent))
import render  # type: ignore[import-not-found]  # noqa: E402  of a folder that is no package

sys.path.pop(0)

CARDS = [("cpu", None), ("cuda", "nvidia.com/gpu"), ("npu", "huawei.com/Ascend910")]
MUTUAL = {"tls": {"secret": "polyreme-tls"}}
Objects = dict[tuple[str, str], dict[str, Any]]


def rendered(*presets: str, values: dict[str, Any] | None = None, release: str = "polyreme") -> Objects:
    """The chart's objects by kind and name."""
    given = render.merged(render.values([name for name in presets if name != "cpu"]), values or {})
    return {(each["kind"], each["metadata"]["name"]): each for each in render.objects(given, release)}


def templates(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Component and pod template of everything that makes pods."""
    for document in objects.values():
        jobs = document["spec"]["replicatedJobs"] if document["kind"] == "JobSet" else []
        for spec in [document.get("spec", {}), *(job["template"]["spec"] for job in jobs)]:
            if "template" in spec:
                yield spec["template"]["metadata"]["labels"]["app.kubernetes.io/name"], spec["template"]


def pods(objects: Objects) -> dict[str, dict[str, Any]]:
    return {name: template["spec"] for name, template in templates(objects)}


def check(document: dict[str, Any]) -> None:
    """Fails unless the object has only the fields of its published schema, with values of their types."""
    if document["kind"] == "ScaledObject":
        assert ScaledObject.model_validate(document).model_dump(by_alias=True, exclude_unset=True, mode="json") == document
    elif document["kind"] == "JobSet":
        model = JobsetV1alpha2JobSet.from_dict(document)
        assert model is not None
        known = model.to_dict()["spec"]
        assert {**document["spec"], "replicatedJobs": None} == {**known, "replicatedJobs": None}
        for job in document["spec"]["replicatedJobs"]:
            assert job.keys() == {"name", "replicas", "template"}
            kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", **job["template"]}, "1.33", strict=True)
    else:
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_lint_finds_nothing() -> None:
    found = helm_python.lint(str(CHART), strict=True, namespace="polyreme", kube_version="v1.33.0")
    assert found["errors"] == [] and {message["error"] for message in found["messages"]} == {"icon is recommended"}


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize(
    "presets",
    [
        (),
        ("colocated", "external"),
        ("environments", "nodes", "sentinel"),
        ("online",),
        ("serve", "sentinel"),
        ("serve", "agents"),
    ],
)
def test_presets_of_all_devices_fit_the_schemas(device: str, presets: tuple[str, ...]) -> None:
    for values in ({}, MUTUAL):
        for document in rendered(device, *presets, values=values).values():
            check(document)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"devise": "cuda"}, "devise"),
        ({"redis": {"mode": "external"}}, "/redis/url"),
        ({"redis": {"mode": "external", "url": "rediss://me:secret@redis:6380/0"}}, "/redis/url"),
        ({"redis": {"url": "redis://elsewhere:6379/0"}}, "/redis/url"),
        ({"images": {"trainer": {"digest": "latest"}}}, "/images/trainer/digest"),
        ({"placement": "colocated", "trainer": {"nodes": 2}}, "/trainer/nodes"),
        ({"trainer": {"parallel": {"nodes": 2}}}, "nodes"),
        ({"serve": {"enabled": True}, "trainer": {"nodes": 2}}, "/trainer/nodes"),
        ({"serve": {"enabled": True}, "environment": {"enabled": True}}, "/environment/enabled"),
        ({"environment": {"online": True}}, "/environment/enabled"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmError, match=re.escape(named)):
        render.objects(values)


def test_the_demo_has_one_of_everything() -> None:
    kinds = [kind for kind, _ in rendered()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        **{"Service": 1, "StatefulSet": 1, "Deployment": 2, "Job": 1, "PersistentVolumeClaim": 2, "ConfigMap": 2},
        **{"PodDisruptionBudget": 4, "HorizontalPodAutoscaler": 2, "NetworkPolicy": 3},
    }
    demo = (ROOT / "examples" / "running_total" / "run.yaml").read_text()
    assert (
        (CHART / "files" / "run.yaml").read_text()
        == demo
        == rendered()["ConfigMap", "polyreme-run"]["data"]["run.yaml"].strip("\n") + "\n"
    )


def test_two_releases_of_a_namespace_share_nothing() -> None:
    one, other = (rendered("environments", "nodes", release=name) for name in ("one", "other"))
    assert not one.keys() & other.keys()
    for objects, release in ((one, "one"), (other, "other")):
        for kind, name in objects:
            if kind in ("Service", "PodDisruptionBudget", "NetworkPolicy"):
                spec = objects[kind, name]["spec"]
                selector = spec.get("selector") or spec["podSelector"]
                assert selector.get("matchLabels", selector)["app.kubernetes.io/instance"] == release, (kind, name)


def test_every_pod_is_confined_and_gets_secrets_by_reference() -> None:
    """Kubernetes would set VLLM_PORT=tcp://... beside a service called vllm, and our own names must not look like such variables."""
    objects = rendered("environments", "sentinel", "nodes", values=MUTUAL)
    found = pods(objects)
    assert found.keys() == {"redis", "reward", "rollout", "environment", "gateway", "trainer", "learner"}
    for name, pod in found.items():
        assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False, name
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
            secret = [each for each in container.get("env", []) if re.search("PASSWORD|TOKEN", each["name"])]
            assert all(each["valueFrom"]["secretKeyRef"]["name"] == "polyreme" for each in secret)
            assert len(secret) == (0 if container["name"] == "prepare" else 1 if name == "redis" else 2), name
    assert "Secret" not in {kind for kind, _ in objects}
    sources = [path for folder in ("polyreme", "services") for path in (ROOT / folder).rglob("*.py")]
    ours = {name for path in sources for name in re.findall(r"POLYREME_[A-Z_]+", path.read_text())}
    assert "POLYREME_REDIS" in ours
    assert not [name for name in ours if re.search(r"_(PORT|SERVICE_HOST|SERVICE_PORT)(_|$)", name)]


@pytest.mark.parametrize(("device", "card"), CARDS)
def test_images_cards_and_arguments_are_the_device_s(device: str, card: str | None) -> None:
    found = pods(rendered(device, "nodes", values={"rollout": {"cards": 2}}))
    for name, image, cards in (("rollout", "rollout", "2"), ("trainer", "trainer", "1"), ("learner", "trainer", "1")):
        (container,) = found[name]["containers"]
        assert container["image"] == f"polyreme/{image}:{device}"
        assert container["resources"]["limits"].get(card) == (card and cards)
    assert f"device={device}" in found["trainer"]["containers"][0]["args"]
    assert "nvidia.com/gpu" not in found["reward"]["containers"][0]["resources"]["limits"]
    pinned = "sha256:" + "0" * 64
    (trainer,) = pods(rendered(device, values={"images": {"trainer": {"digest": pinned}}}))["trainer"]["containers"]
    assert trainer["image"] == f"polyreme/trainer@{pinned}"


def test_arguments_are_what_the_commands_take(tmp_path: Path) -> None:
    """Every `key=value` is a key of the configuration, and every first word a command."""
    found = pods(rendered("cpu", "environments", "nodes", values={"overrides": ["iterations=64"], **MUTUAL}))
    known = {command.name for command in commands()}
    words = [container["args"][0] for pod in found.values() for container in pod["containers"] if "args" in container]
    assert {*words} == {"train", "environment", "gateway"} and {*words} <= known
    arguments = found["trainer"]["containers"][0]["args"]
    overrides = [word for word in arguments if re.match(r"[a-z_.]+=", word)]
    config = load_config(CHART / "files" / "run.yaml", [*overrides, f"output_dir={tmp_path}"])
    assert (config.iterations, config.trainer.parallel.nodes, config.trainer.parallel.data) == (64, 2, 2)
    assert config.security is not None and config.security.mutual and config.security.token_env == "POLYREME_TOKEN"
    assert found["learner"]["containers"][0]["command"][-1].split()[1:3] == ["polyreme", "learner"] and "learner" in known


def test_a_training_service_is_one_pod_in_place_of_a_run(tmp_path: Path) -> None:
    """Its three processes are containers that restart alone; each has the command, the volumes and the key that it needs."""
    objects = rendered("cuda", "serve", values=MUTUAL)
    assert pods(objects).keys() == {"redis", "serve"}
    assert {kind for kind, name in objects if "serve" in name} == {
        *("ConfigMap", "PodDisruptionBudget", "Service", "StatefulSet")
    }
    containers = {container["name"]: container for container in pods(objects)["serve"]["containers"]}
    assert {name: container["image"] for name, container in containers.items()} == {
        **{name: "polyreme/trainer:cuda" for name in ("api", "learner", "observer")},
        "sampler": "polyreme/rollout:cuda",
    }
    cards = {name: container["resources"]["limits"].get("nvidia.com/gpu") for name, container in containers.items()}
    assert cards == {"api": None, "learner": "1", "observer": None, "sampler": "1"}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for name, container in containers.items():
        words = container["args"]
        assert words[:1] == ["sampler"] if name == "sampler" else words[:2] == ["serve", f"--part={name}"]
        assert words[0] in {each.name for each in commands()} and "/polyreme/serve.yaml" in words
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/polyreme/serve.yaml", "/runs", "/polyreme/data", "/dev/shm"} <= mounts
        keys = [each["valueFrom"]["secretKeyRef"] for each in container["env"] if each["name"] == "POLYREME_SERVE_KEY"]
        assert keys == ([] if name == "sampler" else [{"name": "polyreme", "key": "serve-key"}])
        composed = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", services[f"serve-{name}"]["command"]).split()
        plain = [word for word in container["args"] if not re.match("security.(certificate|key)=", word)]
        assert [word.replace("device=cpu", "device=cuda") for word in composed] == plain
    overrides = [word.replace("/runs", str(tmp_path)) for word in containers["api"]["args"][3:]]
    config = read_serve(CHART / "files" / "serve.yaml", overrides)
    assert config.security is not None and config.security.token_env == "POLYREME_SERVE_KEY" and not config.security.mutual
    assert (config.host, config.port, config.page_port, config.device) == ("0.0.0.0", 8080, 8081, "cuda")


def test_session_addresses_are_beside_the_training_service(tmp_path: Path) -> None:
    """With the variables and arguments that compose gives them, but for the port, which is the pod's."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    objects = rendered("serve", "agents")
    containers = {each["name"]: each for each in pods(objects)["serve"]["containers"]}
    assert {"turns", "agents"} <= containers.keys() and "agents.port=8452" in containers["api"]["args"]
    for name in ("api", "turns", "agents"):
        keys = {each["name"] for each in containers[name]["env"] if "SESSION" in each["name"]}
        assert keys == {"POLYREME_SESSION_KEY", "POLYREME_SESSION_TOKEN"}
    composed = {
        name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", services[f"serve-{name}"]["command"]).split() for name in ("turns", "agents")
    }
    assert [*composed["turns"], "agents.port=8452"] == containers["turns"]["args"]
    assert [*composed["agents"][:-1], "8452"] == containers["agents"]["args"]
    overrides = [word.replace("/runs", str(tmp_path)) for word in containers["api"]["args"][3:]]
    assert agents_run_id(read_serve(CHART / "files" / "serve.yaml", overrides)) in composed["agents"]
    named = pods(rendered("serve", "agents", values={"config": "name: mine\nmodel: {path: x}\n"}))["serve"]["containers"]
    assert "mine-agents" in next(each["args"] for each in named if each["name"] == "agents")
    ports = {each["name"]: each["port"] for each in objects["Service", "polyreme-serve"]["spec"]["ports"]}
    assert ports == {"http": 8080, "agents": 8452}
    (reached,) = objects["NetworkPolicy", "polyreme-clients"]["spec"]["ingress"]
    assert [each["port"] for each in reached["ports"]] == [8080, 8452]


def test_clients_reach_what_is_there_to_be_called() -> None:
    for presets, called in ((("serve",), {"serve"}), (("online",), {"environment"}), (("environments",), {"gateway"})):
        objects = rendered(*presets)
        assert {name.removeprefix("polyreme-") for kind, name in objects if kind == "Service"} == {"redis", *called}
        (rule,) = objects["NetworkPolicy", "polyreme-clients"]["spec"]["podSelector"]["matchExpressions"]
        assert called <= set(rule["values"]) and (called == {"environment"}) == ("environment" in rule["values"])
        for name in called:
            (container, *_) = pods(objects)[name]["containers"]
            target = objects["Service", f"polyreme-{name}"]["spec"]["ports"][0]["targetPort"]
            assert {"name": target, "containerPort": 8080} in container["ports"]
    (server,) = pods(rendered("online"))["environment"]["containers"]
    assert [each["valueFrom"]["secretKeyRef"]["key"] for each in server["env"] if each["name"] == "POLYREME_ONLINE_KEY"] == [
        "online-key"
    ]


@pytest.mark.parametrize("name", ["gateway", "environment"])
def test_compose_and_the_chart_start_a_service_alike(name: str) -> None:
    service = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"][name]
    (container,) = pods(rendered("environments"))[name]["containers"]
    assert service["profiles"] == [name] and container["args"] == service["command"].split()
    assert container["image"].partition(":")[0] == service["image"].partition(":")[0]


def test_the_learner_s_pods_meet_by_name_and_share_files() -> None:
    objects = rendered("nodes", values={"trainer": {"nodes": 4, "parallel": {"data": 4}}})
    group = objects["JobSet", "polyreme-run"]["spec"]
    trainer, learner = (job["template"]["spec"] for job in group["replicatedJobs"])
    arguments = trainer["template"]["spec"]["containers"][0]["args"]
    # JobSet names a pod's host <JobSet>-<job>-<replica>-<index> in the domain `subdomain`.
    assert f"--advertise=polyreme-run-trainer-0-0.{group['network']['subdomain']}" in arguments
    assert "trainer.parallel.nodes=4" in arguments and learner["completions"] == learner["parallelism"] == 3
    assert trainer["template"]["spec"]["terminationGracePeriodSeconds"] == 600  # as in compose
    assert group["network"]["publishNotReadyAddresses"] and group["successPolicy"]["targetReplicatedJobs"] == ["trainer"]
    # A lost machine's pod is replaced at once, a trainer's only when it has surely ended.
    assert (learner["podReplacementPolicy"], trainer["podReplacementPolicy"]) == ("TerminatingOrFailed", "Failed")
    assert learner["completionMode"] == "Indexed" and learner["backoffLimit"] > 0 == trainer["backoffLimit"]
    ours, theirs = (
        {mount["name"]: mount["mountPath"] for mount in spec["template"]["spec"]["containers"][0]["volumeMounts"]}
        for spec in (learner, trainer)
    )
    assert ours.items() <= theirs.items() and {"data", "runs"} <= ours.keys()
    for claim in ("data", "runs"):
        assert objects["PersistentVolumeClaim", f"polyreme-{claim}"]["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_the_learner_s_pods_reach_its_store_and_its_collectives() -> None:
    objects = rendered("nodes")
    policy, general = (objects["NetworkPolicy", f"polyreme-{name}"]["spec"] for name in ("learner", "run"))
    learner, *others = policy["ingress"]
    assert learner == {"from": [{"podSelector": policy["podSelector"]}]}
    for rule in others:
        assert not [each for each in rule["ports"] if each["port"] <= 29500 <= each.get("endPort", each["port"])]
    assert general["podSelector"]["matchExpressions"] == [{"key": "polyreme/learner", "operator": "DoesNotExist"}]
    labels = {name: template["metadata"]["labels"] for name, template in templates(objects)}
    assert {name for name, each in labels.items() if each.items() >= policy["podSelector"]["matchLabels"].items()} == {
        "trainer",
        "learner",
    }
    assert all(each.items() >= general["podSelector"]["matchLabels"].items() for each in labels.values())


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_learner_and_replica_share_a_pod(device: str) -> None:
    objects = rendered(device, "colocated")
    assert not [kind for kind, name in objects if name == "polyreme-rollout"]
    pod = pods(objects)["trainer"]
    _, replica = pod["initContainers"]
    (trainer,) = pod["containers"]
    assert replica["restartPolicy"] == "Always" and replica["image"] == f"polyreme/rollout:{device}"
    assert "placement=colocated" in trainer["args"] and "startupProbe" not in replica  # the replica waits for the trainer's run
    ports = [port["containerPort"] for container in (trainer, replica) for port in container["ports"]]
    assert len(set(ports)) == len(ports) and f"--http-port={ports[-1]}" in replica["args"]
    assert {mount["name"] for mount in replica["volumeMounts"]} <= {mount["name"] for mount in trainer["volumeMounts"]}


@pytest.mark.parametrize("presets", [(), ("sentinel",)])
def test_redis_refuses_writes_before_the_kernel_ends_it(presets: tuple[str, ...], tmp_path: Path) -> None:
    objects = rendered(*presets)
    server = pods(objects)["redis"]["containers"][0]
    assert {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}} in server["env"]
    (tmp_path / "redis-server").write_text("#!/bin/sh\ncat\n")
    (tmp_path / "redis-server").chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "POLYREME_REDIS_PASSWORD": "a", "STATE": str(tmp_path), "MEMORY": str(2 << 30)}
    script = objects["ConfigMap", "polyreme-redis"]["data"]["redis.sh"]
    done = subprocess.run(["sh", "-c", script, "redis.sh", "server"], env=given, capture_output=True, text=True, timeout=60)
    assert f"maxmemory {3 << 29}" in done.stdout.splitlines(), done.stderr


def test_an_external_redis_is_reached_with_its_ca() -> None:
    objects = rendered("external", "nodes", "environments")
    assert not [name for _, name in objects if "redis" in name]
    for name, pod in pods(objects).items():
        (container,) = pod["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        url = split(variables["POLYREME_REDIS"] or "")
        assert (url.scheme, url.hostname, url.username, url.query) == (
            "rediss",
            "redis.example.org",
            "polyreme",
            "ssl_ca_certs=/polyreme/redis-ca/ca.crt",
        )
        assert {"name": "redis-ca", "mountPath": "/polyreme/redis-ca", "readOnly": True} in container["volumeMounts"], name


def test_probes_come_from_inside_where_ports_have_tls() -> None:
    for values, kind in ((MUTUAL, "exec"), ({}, "httpGet")):
        for name, pod in pods(rendered("environments", values=values)).items():
            probes = [probe for key, probe in pod["containers"][0].items() if key.endswith("Probe")]
            assert probes and (name == "redis" or all(kind in probe for probe in probes)), name


def test_scalers_ask_for_metrics_that_there_are() -> None:
    adapter = yaml.safe_load((ROOT / "deploy" / "observability" / "adapter.yaml").read_text())["rules"]
    served = {rule["name"]["as"]: rule["metricsQuery"] for kind in ("external", "custom") for rule in adapter[kind]}
    objects = rendered()
    wanted = {
        metric[kind.lower() if kind != "External" else "external"]["metric"]["name"]
        for (object_kind, _), each in objects.items()
        if object_kind == "HorizontalPodAutoscaler"
        for metric in each["spec"]["metrics"]
        for kind in [metric["type"]]
    }
    assert wanted == served.keys()
    triggers = [
        trigger
        for (kind, _), each in rendered("environments").items()
        if kind == "ScaledObject"
        for trigger in each["spec"]["triggers"]
    ]
    asked = {name for trigger in triggers for name in re.findall(r"polyreme_\w+", trigger["metadata"]["query"])}
    assert len(triggers) == len(served) and {"polyreme_train_learner_wait_ratio", "polyreme_reward_items_inside"} <= asked
    of_the_adapter = {name for text in map(str, (adapter, served)) for name in re.findall(r"polyreme_\w+", text)}
    assert asked == of_the_adapter - {"polyreme_rollout_busy_replicas"}
