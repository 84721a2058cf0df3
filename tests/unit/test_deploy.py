"""The manifests in deploy/kubernetes, without a cluster."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
import textwrap
from configparser import ConfigParser
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator

from pdserve import __version__
from pdserve.cli import build_parser
from pdserve.cli.options import KEY_FILE_VARIABLE, config_from
from pdserve.config import MOVE_S, UNPIN_S, Config
from pdserve.observe.metrics import METRICS
from tests.support.commands import ROOT, run
from tests.support.kubernetes_api import rights_of

schemas = pytest.importorskip("kubernetes_validate.utils")
DEPLOY = ROOT / "deploy/kubernetes"
CONFIG = DEPLOY / "base/pdserve.yaml"
# Kustomize's own files, our configuration, and resources that the schemas do not know: those of the
# Prometheus operator, cert-manager, KEDA, the Gateway API and LeaderWorkerSet, which tests look at
# by structure.
CHART = DEPLOY.parent / "helm/pdserve"
CHART_MAKER = runpy.run_path(str(CHART.parent / "generate.py"))
OTHERS = "kustomization names monitors certificates scaledobjects route pdservice disaggregatedset"
NO_SCHEMA = {CONFIG, *(path for name in OTHERS.split() for path in DEPLOY.rglob(f"{name}.yaml"))}
FILES = sorted(x for x in DEPLOY.rglob("*.yaml") if x not in NO_SCHEMA)
# The last minor that the installed schemas know, and the one two before it.
VERSIONS = list({x.rpartition(".")[0]: x for x in schemas.all_versions()}.values())[-3::2]
PODS = {"pdserve-router", "pdserve", "pdserve-scaler", "pdserve-operator"}
UNITS = sorted((DEPLOY.parent / "systemd").iterdir())
Found = dict[tuple[str, str], dict[str, Any]]


def overlay(folder: Path, *components: str) -> Path:
    """Write the overlay that docs/deploy.md shows, with more components, and a changed
    configuration, beside a copy of the manifests. Return its folder."""
    text = shown("mysite/kustomization.yaml")
    shutil.copytree(DEPLOY.parent, folder / "deploy")
    (folder / "mysite").mkdir()
    more = "".join(f"  - ../deploy/kubernetes/components/{x}\n" for x in components)
    text = text.replace("images:\n", f"{more}images:\n")
    (folder / "mysite/kustomization.yaml").write_text(text)
    changed = CONFIG.read_text("utf-8") + "  log: {level: debug}\n"
    (folder / "mysite/pdserve.yaml").write_text(changed)
    return folder / "mysite"


def shown(title: str) -> str:
    """Return the block of docs/deploy.md that begins with this comment."""
    document = (DEPLOY.parents[1] / "docs/deploy.md").read_text("utf-8")
    (text,) = re.findall(rf"```yaml\n *# {re.escape(title)}\n(.*?)```", document, re.DOTALL)
    return textwrap.dedent(text)


def without_replicas(folder: Path) -> Path:
    path = folder / "kustomization.yaml"
    path.write_text(re.sub(r"^replicas:\n(  - .*\n)+", "", path.read_text(), flags=re.MULTILINE))
    return folder


def documents(text: str) -> list[Any]:
    """Return what YAML's parser in C reads: all manifests are read many times."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def workload(name: str) -> dict[str, Any]:
    for path in FILES:
        for document in documents(path.read_text("utf-8")):
            if (document["kind"], document["metadata"]["name"]) == ("Deployment", name):
                return document["spec"]["template"]["spec"]
    raise AssertionError(f"no Deployment {name}")


def config_of(pod: dict[str, Any], *more: str, **injected: str) -> Config:
    """Return the configuration that the container of a pod starts with, with more arguments, and
    with variables that somebody else sets."""
    (container,) = pod["containers"]
    words = " ".join((*container["args"], *more)).replace("/etc/pdserve/pdserve.yaml", str(CONFIG))
    values = {"POD_ROLE": "decode", "POD_IP": "10.1.2.3", "POD_NAME": "pdserve-decode-5f-x7"}
    values |= {"NODE": "node-1", "ZONE": "eu-1a", "REGION": ""}  # a label that is missing is empty
    fields = [x["name"] for x in container.get("env", ()) if "valueFrom" in x]
    declared = {name: values[name] for name in fields}
    for name, value in (declared | injected).items():
        words = words.replace(f"$({name})", value)
    return config_from(build_parser().parse_args(words.split()))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda x: str(x.relative_to(DEPLOY)))
def test_manifests_are_valid(path: Path, version: str) -> None:
    for document in documents(path.read_text("utf-8")):
        schemas.validate(document, version, strict=True)


def test_a_misspelt_field_is_not_valid() -> None:
    document = next(yaml.safe_load_all((DEPLOY / "pools/worker/worker.yaml").read_text("utf-8")))
    document["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(schemas.ValidationError, match="enableServiceLink"):
        schemas.validate(document, VERSIONS[-1], strict=True)


def test_ports_are_those_of_the_configuration() -> None:
    router = config_of(workload("pdserve-router")).router
    worker = config_of(workload("pdserve")).worker
    http = {"http": router.http.port, "grpc": router.grpc.port}
    debug = {"grpc": worker.port, "debug": worker.debug.port}
    for name, ports in (("pdserve-router", http), ("pdserve", debug)):
        (container,) = workload(name)["containers"]
        assert {x["name"]: x["containerPort"] for x in container["ports"]} == ports
        probes = {x: container[x]["httpGet"] for x in container if x.endswith("Probe")}
        assert {x["port"] for x in probes.values()} == {next(x for x in ports if x != "grpc")}
        # A router without workers for one model serves the others.
        paths = {name.removesuffix("Probe"): x["path"] for name, x in probes.items()}
        at_router = {"startup": "/ready", "readiness": "/health", "liveness": "/health"}
        at_worker = {"startup": "/healthz", "readiness": "/ready", "liveness": "/healthz"}
        assert paths == (at_router if name == "pdserve-router" else at_worker)
    assert worker.routers == (f"dns:pdserve-routers:{router.grpc.port}",)


def test_other_pods_reach_what_listens_and_know_where_it_is() -> None:
    router, worker = (
        config_of(workload("pdserve-router")).router,
        config_of(workload("pdserve")).worker,
    )
    assert (router.http.host, router.grpc.host) == ("0.0.0.0", "0.0.0.0")
    assert {worker.host, worker.kv.host, worker.debug.host} == {"10.1.2.3"}
    assert (worker.worker_id, worker.role.value) == ("pdserve-decode-5f-x7", "decode")
    assert router.topology.labels == worker.topology.labels == {"host": "node-1", "zone": "eu-1a"}


def test_a_pod_is_not_killed_before_it_has_drained() -> None:
    router, pod = config_of(workload("pdserve-router")).router, workload("pdserve-router")
    before = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before + router.stop_grace_s
    worker = config_of(workload("pdserve")).worker
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


def bytes_of(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", text).groups()  # type: ignore[union-attr]
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


@pytest.mark.parametrize("name", sorted(PODS))
def test_a_pod_takes_no_more_of_its_node_than_is_said(name: str) -> None:
    pod = workload(name)
    (container,) = pod["containers"]
    limits = {x: bytes_of(size) for x, size in container["resources"]["limits"].items()}
    assert limits.keys() == {"memory", "ephemeral-storage"}
    requests = container["resources"]["requests"]
    # Kubernetes takes a limit without a request as the request.
    assert all(bytes_of(requests[x]) <= limits[x] // 4 for x in limits), "the node reserves it"
    empty = [x["emptyDir"] for x in pod["volumes"] if "emptyDir" in x]
    sizes: dict[str, int] = {"memory": 0, "ephemeral-storage": 0}
    for volume in empty:
        kind = "memory" if volume.get("medium") == "Memory" else "ephemeral-storage"
        sizes[kind] += bytes_of(volume["sizeLimit"])
    assert all(sizes[kind] < limits[kind] for kind in limits), "a full volume is not an eviction"
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    soon = {x["key"].rpartition("/")[2]: x["tolerationSeconds"] for x in pod["tolerations"]}
    assert soon == {"unreachable": 10, "not-ready": 10}


def test_every_pod_is_looked_at() -> None:
    found = [x for path in FILES for x in documents(path.read_text("utf-8"))]
    assert {x["metadata"]["name"] for x in found if "template" in x.get("spec", {})} == PODS


@pytest.mark.parametrize("name", ["scaler", "operator"])
def test_a_process_that_looks_no_more_is_restarted(name: str) -> None:
    pod = workload(f"pdserve-{name}")
    (container,) = pod["containers"]
    file = build_parser().parse_args(container["args"]).alive_file
    assert str(file) in container["livenessProbe"]["exec"]["command"][-1]
    assert str(file.parent) in {x["mountPath"] for x in container["volumeMounts"]}


@pytest.mark.parametrize("path", UNITS, ids=lambda x: x.name)
def test_a_unit_of_systemd_starts_a_command_and_gives_it_time_to_stop(path: Path) -> None:
    unit = ConfigParser(interpolation=None)
    unit.read_string(path.read_text("utf-8"))
    service = unit["Service"]
    program, words = service["ExecStart"].replace("%i", "decode").split(maxsplit=1)
    assert program == "/opt/pdserve/bin/pdserve"
    found = words.replace("/etc/pdserve/pdserve.yaml", str(CONFIG)).split()
    config = config_from(build_parser().parse_args(found))
    worker_s = config.worker.drain_timeout_s + MOVE_S + UNPIN_S
    needed = {"router": config.router.stop_grace_s, "worker": worker_s}
    assert service.getint("TimeoutStopSec") > needed.get(found[0], sum(needed.values()))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text("utf-8").replace("/opt/pdserve/bin/pdserve", sys.executable)
        (tmp_path / path.name).write_text(text)
    # What systemd would ignore is on stderr, with exit code 0.
    assert run("sh", "-c", "systemd-analyze verify ./*.service 2>&1", cwd=tmp_path) == ""


def render(folder: Path) -> Found:
    if CHART_MAKER["KUBECTL"] is None:
        pytest.skip("kubectl is not installed")
    objects = CHART_MAKER["kustomize"](folder)
    for document in objects:
        if document["kind"] == "Deployment":  # which components patch
            schemas.validate(document, VERSIONS[-1], strict=True)
    return {(x["kind"], x["metadata"]["name"]): x for x in objects}


def pod_of(found: Found, role: str) -> dict[str, Any]:
    return found["Deployment", f"pdserve-{role}"]["spec"]["template"]["spec"]


def secret_of(pod: dict[str, Any], volume: str) -> str:
    (name,) = (x["secret"]["secretName"] for x in pod["volumes"] if x["name"] == volume)
    return str(name)


def mounted(role: str, found: Found) -> str:
    volumes = pod_of(found, role)["volumes"]
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
        # A drain does not wait for pods that are not ready.
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_overlay_of_the_docs_changes_what_it_says(base: Found, tmp_path: Path) -> None:
    found = render(overlay(tmp_path))
    assert {x["metadata"]["namespace"] for x in found.values()} == {"pdserve"}
    scraped = found["PodMonitor", "pdserve-worker"]["spec"]["podMetricsEndpoints"][0]["port"]
    assert scraped in {x["name"] for x in workload("pdserve")["containers"][0]["ports"]}
    for role, replicas in (("router", 2), ("prefill", 2), ("decode", 4)):
        name = f"pdserve-{role}"
        # The configuration was changed, so that the pods are replaced.
        assert mounted(role, found) != mounted(role, base)
        spec = found["Deployment", name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert spec["replicas"] == replicas
        assert container["image"].startswith("registry.example/pdserve-")
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (role != "router")


def test_a_cluster_on_a_laptop_has_workers_for_cpus(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY.parent, tmp_path / "deploy")
    (tmp_path / "laptop").mkdir()
    path = tmp_path / "laptop/kustomization.yaml"
    path.write_text(shown("laptop/kustomization.yaml"))
    found = render(path.parent)
    for role, image in (("router", "router"), ("prefill", "worker-cpu"), ("decode", "worker-cpu")):
        (container,) = pod_of(found, role)["containers"]
        assert container["image"] == f"pdserve-{image}:{__version__}"
        assert found["Deployment", f"pdserve-{role}"]["spec"]["replicas"] == 1


@pytest.mark.parametrize("role", ["encode", "pooling"])  # the docs say how a pool becomes another
def test_a_pool_for_another_role_is_like_the_others(role: str, tmp_path: Path) -> None:
    folder = overlay(tmp_path, "tls")
    pool = tmp_path / "deploy/kubernetes/pools/encode/kustomization.yaml"
    pool.write_text(pool.read_text().replace("encode", role))
    site = yaml.safe_load((folder / "kustomization.yaml").read_text())
    more = yaml.safe_load(shown("mysite/kustomization.yaml with encode workers"))
    site["components"] = list(dict.fromkeys(more["components"] + site["components"]))
    site["replicas"].append({"name": f"pdserve-{role}", "count": more["replicas"][0]["count"]})
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(site))
    found = render(folder)
    spec = found["Deployment", f"pdserve-{role}"]["spec"]
    pod, decode = spec["template"]["spec"], pod_of(found, "decode")
    for x in (pod, decode):
        x["topologySpreadConstraints"][0].pop("labelSelector")
    assert pod == decode  # image, GPU, TLS, configuration
    assert spec["replicas"] == 2
    labels = spec["template"]["metadata"]["labels"]
    budget = found["PodDisruptionBudget", f"pdserve-{role}"]["spec"]
    assert labels == spec["selector"]["matchLabels"] == budget["selector"]["matchLabels"]
    assert config_of(pod, f"--role={role}").worker.role == role
    assert labels["app.kubernetes.io/component"] == role  # the pod's role


def test_what_all_namespaces_share_is_named_in_the_docs() -> None:
    """`kubectl delete -k` of one of them takes it from all."""
    text = " ".join((ROOT / "docs/deploy.md").read_text("utf-8").split())
    found = [x for path in FILES for x in documents(path.read_text("utf-8"))]
    shared = [x for x in found if re.match("Cluster|CustomR|.*Admission|.*Class$", x["kind"])]
    assert len(shared) == 3
    for document in shared:
        assert f"{document['kind']} `{document['metadata']['name']}`" in text


def test_tls_has_certificates_where_the_configuration_looks_for_them(tmp_path: Path) -> None:
    found = render(overlay(tmp_path, "tls"))
    issued = {x["spec"]["secretName"]: x["spec"] for k, x in found.items() if k[0] == "Certificate"}
    tls, names = {}, {}
    for role, kind in (("router", "router"), ("prefill", "worker"), ("decode", "worker")):
        pod = pod_of(found, role)
        config = config_of(pod)
        tls[kind] = getattr(config, kind).access.tls
        secret = secret_of(pod, "tls")
        (mount,) = (
            x["mountPath"] for x in pod["containers"][0]["volumeMounts"] if x["name"] == "tls"
        )
        assert tls[kind].is_mutual
        access = getattr(config, kind).access
        assert (access.worker_token_file, access.admin_key_file) == ("", "")
        files = tls[kind].cert_file, tls[kind].key_file, tls[kind].ca_file
        assert files == tuple(f"{mount}/{x}" for x in ("tls.crt", "tls.key", "ca.crt"))
        assert issued[secret]["uris"] == [f"urn:pdserve:role:{kind}"]
        assert {"server auth", "client auth"} == set(issued[secret]["usages"])
        names[kind] = issued[secret]["dnsNames"]
    # One name for both: `pdserve status` asks routers and workers with one `--tls-name`.
    assert tls["router"].peer_name == tls["worker"].peer_name
    assert all(tls["router"].peer_name in x for x in names.values())
    http = config_of(pod_of(found, "router")).router
    assert http.access.http_tls.cert_file
    assert not http.access.http_tls.ca_file  # kubelet has no certificate to show
    for name, scheme in (("router", "HTTPS"), ("decode", "HTTP")):
        (container,) = found["Deployment", f"pdserve-{name}"]["spec"]["template"]["spec"][
            "containers"
        ]
        probes = [container[x]["httpGet"] for x in container if x.endswith("Probe")]
        assert {x.get("scheme", "HTTP") for x in probes} == {scheme}
    assert found["Service", "pdserve"]["metadata"]["name"] in names["router"]
    issuers = {name for kind, name in found if kind == "Issuer"}
    assert {x["issuerRef"]["name"] for x in issued.values()} <= issuers


@pytest.mark.parametrize("component", ["scaler", "operator"])
def test_no_pod_without_the_token_controls_a_router_or_worker(
    component: str, tmp_path: Path
) -> None:
    found = render(without_replicas(overlay(tmp_path, component)))
    secret = found["Secret", "pdserve-token"]
    assert secret["type"] == "kubernetes.io/service-account-token"  # which has a key `token`
    assert "data" not in secret
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    assert ("ServiceAccount", account) in found
    assert not any(account == x["name"] for o in found.values() for x in o.get("subjects", ()))
    for role in ("router", "prefill", "decode", component):
        pod = pod_of(found, role)
        (container,) = pod["containers"]
        (volume,) = (x for x in pod["volumes"] if "secret" in x)
        assert volume["secret"]["secretName"] == "pdserve-token"
        (mount,) = (x for x in container["volumeMounts"] if x["name"] == volume["name"])
        file = f"{mount['mountPath']}/token"
        config = config_of(pod)
        access = config.router.access if role == "router" else config.worker.access
        assert access.worker_token_file == file
        if role == component:  # it serves nothing
            continue
        assert access.admin_key_file == file  # of the operator, and of commands in a router's pod
        variables = {x["name"]: x.get("value") for x in container["env"]}
        assert variables.get(KEY_FILE_VARIABLE) == (file if role == "router" else None)


def test_clients_without_keys_may_use_the_names_of_the_service(base: Found, tmp_path: Path) -> None:
    name = "pdserve"
    assert ("Service", name) in base
    found = render(overlay(tmp_path))
    namespace = found["Service", name]["metadata"]["namespace"]
    (text,) = (x["data"]["pdserve.yaml"] for k, x in base.items() if k[0] == "ConfigMap")
    allowed = yaml.safe_load(text)["router"]["http"]["allowed_hosts"]
    full = f"{name}.{namespace}.svc.cluster.local".split(".")
    assert allowed == [".".join(full[:n]) for n in (1, 2, 3, 5)]


def test_routers_use_the_store_of_the_secret(base: Found, tmp_path: Path) -> None:
    assert config_of(pod_of(base, "router")).router.store.database == ""
    pod = pod_of(render(overlay(tmp_path, "store")), "router")
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "pdserve-store"}}]
    router = config_of(pod, STORE="postgresql://pdserve@db/x", STORE_FILES="s3://b/x").router
    assert (router.store.database, router.store.files) == ("postgresql://pdserve@db/x", "s3://b/x")


def test_scalers_and_routes_refer_to_existing_objects(tmp_path: Path) -> None:
    found = render(without_replicas(overlay(tmp_path, "keda", "gateway")))
    scaled = [x["spec"] for (kind, _), x in found.items() if kind == "ScaledObject"]
    assert len(scaled) == 2
    for spec in scaled:
        target = found["Deployment", spec["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]  # applying it again must not undo the scaler
        role = target["metadata"]["labels"]["app.kubernetes.io/component"]
        metric = METRICS["role_load"]
        (trigger,) = spec["triggers"]
        assert metric.labels == ("model", "role")
        assert trigger["metadata"]["query"] == f'max({metric.shown}{{role="{role}"}})'
    (rule,) = found["HTTPRoute", "pdserve"]["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    ports = found["Service", backend["name"]]["spec"]["ports"]
    assert {x["targetPort"] for x in ports if x["port"] == backend["port"]} == {"http"}
    assert ("PrometheusRule", "pdserve") in found
    shown = found["ConfigMap", "pdserve-dashboards"]["data"]
    assert set(shown) == {x.name for x in DEPLOY.parent.glob("dashboards/*.json")}


def test_the_scaler_may_change_only_what_it_scales(tmp_path: Path) -> None:
    folder = without_replicas(overlay(tmp_path, "scaler", "tls"))
    found = render(folder)
    pod = pod_of(found, "scaler")
    (container,) = pod["containers"]
    assert container["image"] == pod_of(found, "router")["containers"][0]["image"]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    worker = config_of(pod).worker
    assert worker.routers == config_of(pod_of(found, "decode")).worker.routers
    assert worker.access.tls.is_mutual
    mounts = {x["mountPath"] for x in container["volumeMounts"]}
    assert str(Path(worker.access.tls.cert_file).parent) in mounts
    args = build_parser().parse_args(container["args"])
    for role in ("prefill", "decode"):
        assert getattr(args, role).least >= 1
        assert "replicas" not in found["Deployment", f"pdserve-{role}"]["spec"]
    (subject,) = found["RoleBinding", "pdserve-scaler"]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("pdserve", pod["serviceAccountName"])
    names = {x for *_, names in rights_of(found["Role", "pdserve-scaler"]) for x in names}
    assert names == {"pdserve-prefill", "pdserve-decode", args.lease}


@pytest.mark.parametrize(
    ("user", "change", "is_denied"),
    [
        ("scaler", {"metadata": {"annotations": {"cost": "1"}}}, False),
        ("scaler", {"spec": {"containers": [{"image": "evil"}]}}, True),
        ("scaler", {"metadata": {"labels": {"app": "other"}}}, True),
        ("scaler", {"metadata": {"ownerReferences": []}}, True),
        ("scaler", {"metadata": {"finalizers": ["x.y/z"]}}, True),
        ("other", {"spec": {"containers": [{"image": "v2"}]}}, False),
    ],
)
def test_the_scaler_changes_annotations_of_pods_alone(
    user: str, change: dict[str, Any], is_denied: bool
) -> None:
    cel = pytest.importorskip("cel", reason="needs common-expression-language")
    text = (DEPLOY / "components/scaler/scaler.yaml").read_text("utf-8")
    found = {x["kind"]: x for x in documents(text)}
    policy = found["ValidatingAdmissionPolicy"]["spec"]
    assert found["ValidatingAdmissionPolicyBinding"]["spec"] == {
        "policyName": found["ValidatingAdmissionPolicy"]["metadata"]["name"],
        "validationActions": ["Deny"],
    }
    metadata = {"labels": {"app": "pdserve"}, "ownerReferences": [{"name": "x"}], "annotations": {}}
    old = {"metadata": metadata, "spec": {"containers": [{"image": "v1"}]}}
    new = {
        "metadata": metadata | change.get("metadata", {}),
        "spec": change.get("spec", old["spec"]),
    }
    name = f"system:serviceaccount:pdserve:pdserve-{user}"
    request = {"namespace": "pdserve", "userInfo": {"username": name}}
    values = {"object": new, "oldObject": old, "request": request}
    applies = all(cel.evaluate(x["expression"], values) for x in policy["matchConditions"])
    allows = all(cel.evaluate(x["expression"], values) for x in policy["validations"])
    assert (applies and not allows) == is_denied


# sigs.k8s.io/lws/api/disaggregatedset/v1, as far as we use it; a template is a pod's.
def _strict(**properties: Any) -> dict[str, Any]:
    return {"properties": properties, "additionalProperties": False, "required": list(properties)}


_COUNT = {"type": "integer", "minimum": 0}
_ROLLING = _strict(maxUnavailable=_COUNT, maxSurge=_COUNT)
_ROLE = _strict(
    name={"enum": ["prefill", "decode"]},
    scaling=_strict(mode={"enum": ["External"]}, initialReplicas={"type": "integer", "minimum": 1}),
    spec=_strict(  # no `replicas`: they must be unset where scaling is external
        rolloutStrategy=_strict(
            type={"enum": ["RollingUpdate"]}, rollingUpdateConfiguration=_ROLLING
        ),
        leaderWorkerTemplate=_strict(
            size={"type": "integer", "minimum": 1},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
)
DISAGGREGATED_SET = _strict(roles={"items": _ROLE, "minItems": 2, "maxItems": 2})


@pytest.mark.parametrize("scaled_by", ["scaler", "keda"])
def test_a_disaggregated_set_has_the_pods_of_the_pools(scaled_by: str, tmp_path: Path) -> None:
    folder = without_replicas(overlay(tmp_path, "tls", scaled_by))
    pools = render(folder)
    path = folder / "kustomization.yaml"
    more = "  - ../deploy/kubernetes/components/disaggregatedset\n"
    nodes = shown("mysite/kustomization.yaml goes on: two pods for each worker")
    path.write_text(path.read_text().replace("images:\n", f"{more}images:\n") + nodes)
    found = render(folder)
    made = found["DisaggregatedSet", "pdserve"]
    assert list(Draft4Validator(DISAGGREGATED_SET).iter_errors(made["spec"])) == []
    targets = {}
    for role in made["spec"]["roles"]:
        group, name = role["spec"]["leaderWorkerTemplate"], f"pdserve-{role['name']}"
        template = pools["Deployment", name]["spec"]["template"]
        assert group.pop("size") == 2
        for rank, (made_of, made_template) in enumerate(group.items()):
            told = {"GROUP_SIZE": "2", "WORKER_INDEX": str(rank), "LEADER_ADDRESS": "pdserve-0"}
            lws = {f"LWS_{key}": value for key, value in told.items()}
            pod = made_template["spec"]
            worker = config_of(pod, "--set=worker.engine_args.tensor_parallel_size=2", **lws).worker
            assert (worker.nodes.count, worker.nodes.rank, worker.nodes.address) == (
                2,
                rank,
                "pdserve-0",
            )
            # The rest is that of the pool, with the names that this overlay gives to what it
            # mounts; but of a worker's pods the first one alone listens.
            expected = deepcopy(template)
            (container,) = expected["spec"]["containers"]
            container["args"] += [x for x in pod["containers"][0]["args"] if "LWS_" in x]
            listens = [x for x in container if x == "ports" or x.endswith("Probe")]
            assert len(listens) == 4
            if made_of == "workerTemplate":
                for key in listens:
                    del container[key]
            assert made_template == expected
        assert ("Deployment", name) not in found
        targets[role["name"]] = f"disaggregatedsetrolescalers.v1.disaggregatedset.x-k8s.io/{name}"
    if scaled_by == "keda":
        kind = {"apiVersion": "disaggregatedset.x-k8s.io/v1", "kind": "DisaggregatedSetRoleScaler"}
        for role in targets:
            target = found["ScaledObject", f"pdserve-{role}"]["spec"]["scaleTargetRef"]
            assert target == {**kind, "name": f"pdserve-{role}"}
        return
    (container,) = pod_of(found, "scaler")["containers"]
    args = build_parser().parse_args(container["args"])
    assert dict(x.split("=", 1) for x in args.target) == targets
    group, resource = "disaggregatedset.x-k8s.io", "disaggregatedsetrolescalers/scale"
    assert found["Role", "pdserve-scaler"]["rules"][0] == {
        "apiGroups": [group],
        "resources": [resource],
        "resourceNames": [f"pdserve-{role}" for role in targets],
        "verbs": ["get", "patch"],
    }


def test_the_pods_of_a_group_are_data_parallel_ranks(tmp_path: Path) -> None:
    folder = without_replicas(overlay(tmp_path, "disaggregatedset", "groups"))
    path = folder / "kustomization.yaml"
    path.write_text(path.read_text() + shown("mysite/kustomization.yaml goes on: sixteen ranks"))
    for role in render(folder)["DisaggregatedSet", "pdserve"]["spec"]["roles"]:
        group = role["spec"]["leaderWorkerTemplate"]
        size = {"prefill": 4, "decode": 16}[role["name"]]
        assert group["size"] == size
        assert group["leaderTemplate"] == group["workerTemplate"]
        assert "readinessProbe" in group["leaderTemplate"]["spec"]["containers"][0]
        lws = {"GROUP_SIZE": str(size), "WORKER_INDEX": "3", "LEADER_ADDRESS": "pdserve-0"}
        injected = {f"LWS_{key}": value for key, value in lws.items()}
        worker = config_of(group["leaderTemplate"]["spec"], **injected).worker
        assert worker.nodes.count == 1
        assert (worker.data_parallel.size, worker.data_parallel.rank) == (size, 3)
        assert worker.data_parallel.address == worker.data_parallel.group == "pdserve-0"


def test_the_operator_has_templates_and_may_set_weights(tmp_path: Path) -> None:
    found = render(without_replicas(overlay(tmp_path, "operator", "tls")))
    pod, spec = pod_of(found, "operator"), found["PDService", "pdserve"]["spec"]
    for role in ("prefill", "decode"):
        template = found["Deployment", spec[role]["deployment"]]
        assert "replicas" not in template["spec"]
        assert template["metadata"]["labels"]["app.kubernetes.io/component"] == role
        # The operator adds an argument to the first container.
        assert template["spec"]["template"]["spec"]["containers"][0]["args"][0] == "worker"
    config = config_of(pod)
    assert config.worker.routers == config_of(pod_of(found, "decode")).worker.routers
    assert spec["model"] == config.worker.served_names[0]
    secret = secret_of(pod, "tls")
    issued = [x["spec"] for (kind, _), x in found.items() if kind == "Certificate"]
    assert [x["uris"] for x in issued if x["secretName"] == secret] == [["urn:pdserve:role:admin"]]
    assert "nvidia.com/gpu" not in pod["containers"][0]["resources"]["limits"]
    (subject,) = found["RoleBinding", "pdserve-operator"]["subjects"]
    assert (subject["namespace"], subject["name"]) == ("pdserve", pod["serviceAccountName"])


POOL = {"deployment": "x", "replicas": 2}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"decode": {**POOL, "canary": 2}}, ""),
        ({"decode": {**POOL, "canary": 3}}, "canary must not be above replicas"),
        ({"decode": None}, "'decode' is a required property"),
        ({"prefill": None}, "'prefill' is a required property"),
        ({"steps": [5, 100]}, "100 is greater than the maximum"),
        ({"model": ""}, "non-empty"),
    ],
)
def test_a_service_that_cannot_be_is_refused(change: dict[str, Any], reason: str) -> None:
    cel = pytest.importorskip("cel", reason="needs common-expression-language")
    crd = yaml.safe_load((DEPLOY / "components/operator/crd.yaml").read_text("utf-8"))
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    service = {"model": "m", "prefill": POOL, "decode": POOL, **change}
    service = {key: value for key, value in service.items() if value is not None}
    refused = [x.message for x in Draft4Validator(schema).iter_errors(service)]
    for pool in () if refused else ("prefill", "decode"):
        told = schema["properties"][pool]
        defaults = {k: x["default"] for k, x in told["properties"].items() if "default" in x}
        refused += [
            rule["message"]
            for rule in told["x-kubernetes-validations"]
            if not cel.evaluate(rule["rule"], {"self": {**defaults, **service[pool]}})
        ]
    assert bool(refused) == bool(reason)
    assert any(reason in x for x in refused) or not reason


def test_the_chart_is_what_the_base_makes() -> None:
    if CHART_MAKER["KUBECTL"] is None:
        pytest.skip("kubectl is not installed")
    made = CHART_MAKER["generated"]()
    for path, text in made.items():
        assert (CHART / path).read_text("utf-8") == text, f"{path}: run `make chart`"


def test_the_chart_renders_the_base(base: Found) -> None:
    helm = pytest.importorskip("helm_python", reason="needs helm-python-sdk")
    assert not helm.lint(str(CHART))["errors"]

    def rendered(values: dict[str, object]) -> Found:
        with helm.Chart.load(str(CHART)) as chart:
            (text,) = chart.render(values, name="pdserve", namespace="pdserve").values()
        found = {(x["kind"], x["metadata"]["name"]): x for x in documents(text)}
        return {(kind, plain(name)): x for (kind, name), x in found.items()}

    def plain(text: str) -> str:
        return re.sub(r"(pdserve-config)-[0-9a-z]{10}\b", r"\1", text)

    def same(found: Found) -> Any:
        """Return the objects with the configuration as values and without the hash in its name."""
        result = yaml.safe_load(plain(yaml.safe_dump(sorted(found.values(), key=str))))
        for document in result:
            if document["kind"] == "ConfigMap":
                document["data"] = yaml.safe_load(document["data"]["pdserve.yaml"])
        return sorted(result, key=lambda x: (x["kind"], x["metadata"]["name"]))

    assert same(rendered({})) == same(base)
    volume = {"name": "models", "hostPath": {"path": "/models"}}
    mount = {"name": "models", "mountPath": "/models"}
    changed: dict[str, object] = {"config": {"worker": {"model": "/models/m"}}}
    found = rendered({**changed, "volumes": [volume], "volumeMounts": [mount]})
    for role in ("router", "prefill", "decode"):
        pod = pod_of(found, role)
        assert volume in pod["volumes"]
        assert mount in pod["containers"][0]["volumeMounts"]
    with pytest.raises(helm.HelmValuesError, match="replica"):
        rendered({"decode": {"replica": 4}})
