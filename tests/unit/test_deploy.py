"""The manifests in deploy/kubernetes, without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli import build_parser
from pdserve.cli.options import config_from
from pdserve.config import MOVE_S, UNPIN_S, Config

schemas = pytest.importorskip("kubernetes_validate.utils")
DEPLOY = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
CONFIG = DEPLOY / "base/pdserve.yaml"
# Kustomize's own files, our configuration, and the resources of the Prometheus operator.
NO_SCHEMA = {*DEPLOY.rglob("kustomization.yaml"), *DEPLOY.rglob("monitors.yaml"), CONFIG}
FILES = sorted(x for x in DEPLOY.rglob("*.yaml") if x not in NO_SCHEMA)
# The last three minors that the installed schemas know.
VERSIONS = list({x.rpartition(".")[0]: x for x in schemas.all_versions()}.values())[-3:]
Found = dict[tuple[str, str], dict[str, Any]]


def overlay(folder: Path) -> Path:
    """Write the overlay that docs/deploy.md shows, and a changed configuration, beside a copy of
    the manifests. Return its folder."""
    document = (DEPLOY.parents[1] / "docs/deploy.md").read_text("utf-8")
    (text,) = re.findall(r"```yaml\n# mysite/kustomization.yaml\n(.*?)```", document, re.DOTALL)
    shutil.copytree(DEPLOY, folder / "deploy/kubernetes")
    (folder / "mysite").mkdir()
    (folder / "mysite/kustomization.yaml").write_text(text)
    changed = CONFIG.read_text("utf-8") + "  log_level: debug\n"
    (folder / "mysite/pdserve.yaml").write_text(changed)
    return folder / "mysite"


def workload(name: str) -> dict[str, Any]:
    for path in FILES:
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            if (document["kind"], document["metadata"]["name"]) == ("Deployment", name):
                return document["spec"]["template"]["spec"]
    raise AssertionError(f"no Deployment {name}")


def config_of(name: str) -> Config:
    """Return the configuration that the container of a Deployment starts with."""
    (container,) = workload(name)["containers"]
    words = " ".join(container["args"]).replace("/etc/pdserve/pdserve.yaml", str(CONFIG))
    values = {"POD_ROLE": "decode", "POD_IP": "10.1.2.3", "POD_NAME": "pdserve-decode-5f-x7"}
    for variable in container.get("env", ()):
        words = words.replace(f"$({variable['name']})", values[variable["name"]])
    return config_from(build_parser().parse_args(words.split()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(DEPLOY)))
def test_manifests_are_valid(path: Path, version: str) -> None:
    for document in yaml.safe_load_all(path.read_text("utf-8")):
        schemas.validate(document, version, strict=True)


def test_a_misspelt_field_is_not_valid() -> None:
    document = next(yaml.safe_load_all((DEPLOY / "pools/worker/worker.yaml").read_text("utf-8")))
    document["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(schemas.ValidationError, match="enableServiceLink"):
        schemas.validate(document, VERSIONS[-1], strict=True)


def test_ports_are_those_of_the_configuration() -> None:
    router = config_of("pdserve-router").router
    worker = config_of("pdserve").worker
    http = {"http": router.http_port, "grpc": router.grpc_port}
    debug = {"grpc": worker.port, "debug": worker.debug_port}
    for name, ports in (("pdserve-router", http), ("pdserve", debug)):
        (container,) = workload(name)["containers"]
        assert {x["name"]: x["containerPort"] for x in container["ports"]} == ports
        probes = {x: container[x]["httpGet"] for x in container if x.endswith("Probe")}
        assert {x["port"] for x in probes.values()} == {next(x for x in ports if x != "grpc")}
        assert probes["readinessProbe"]["path"] == "/ready"
        assert probes["livenessProbe"]["path"] != "/ready"
    assert worker.routers == (f"dns:pdserve-routers:{router.grpc_port}",)


def test_other_pods_reach_what_listens() -> None:
    router, worker = config_of("pdserve-router").router, config_of("pdserve").worker
    assert (router.http_host, router.grpc_host) == ("0.0.0.0", "0.0.0.0")
    assert {worker.host, worker.kv.host, worker.debug_host} == {"10.1.2.3"}
    assert (worker.worker_id, worker.role.value) == ("pdserve-decode-5f-x7", "decode")


def test_a_pod_is_not_killed_before_it_has_drained() -> None:
    router, pod = config_of("pdserve-router").router, workload("pdserve-router")
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + router.stop_grace_s
    worker = config_of("pdserve").worker
    needed = worker.drain_timeout_s + MOVE_S + UNPIN_S
    assert workload("pdserve")["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("name", ["pdserve-router", "pdserve"])
def test_pods_have_no_rights(name: str) -> None:
    pod = workload(name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert (rights["readOnlyRootFilesystem"], rights["allowPrivilegeEscalation"]) == (True, False)
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert {"/tmp", "/home/pdserve"} <= {x["mountPath"] for x in container["volumeMounts"]}


def render(folder: Path) -> Found:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "kustomize", folder]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {(x["kind"], x["metadata"]["name"]): x for x in yaml.safe_load_all(found)}


def mounted(name: str, found: Found) -> str:
    volumes = found["Deployment", name]["spec"]["template"]["spec"]["volumes"]
    (config,) = (str(x["configMap"]["name"]) for x in volumes if "configMap" in x)
    assert ("ConfigMap", config) in found
    return config


@pytest.fixture(scope="module")
def base() -> Found:
    return render(DEPLOY / "base")


def test_the_base_has_a_pool_for_each_role(base: Found) -> None:
    for document in base.values():
        schemas.validate(document, VERSIONS[-1], strict=True)
    for role in ("router", "prefill", "decode"):
        spec = base["Deployment", f"pdserve-{role}"]["spec"]
        budget = base["PodDisruptionBudget", f"pdserve-{role}"]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == role
        assert labels == spec["selector"]["matchLabels"] == budget["selector"]["matchLabels"]


def test_the_overlay_of_the_docs_changes_what_it_says(base: Found, tmp_path: Path) -> None:
    found = render(overlay(tmp_path))
    assert {x["metadata"]["namespace"] for x in found.values()} == {"pdserve"}
    scraped = found["PodMonitor", "pdserve-worker"]["spec"]["podMetricsEndpoints"][0]["port"]
    assert scraped in {x["name"] for x in workload("pdserve")["containers"][0]["ports"]}
    for role, replicas in (("router", 2), ("prefill", 2), ("decode", 4)):
        name = f"pdserve-{role}"
        # The configuration was changed, so that the pods are replaced.
        assert mounted(name, found) != mounted(name, base)
        spec = found["Deployment", name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["replicas"] == replicas
        assert container["image"].startswith("registry.example/pdserve-")
        assert ("limits" in container["resources"]) == (role != "router")
