"""A fake Kubernetes API server with the calls that our code uses: objects in memory over HTTP."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_COMPONENTS = Path(__file__).parents[2] / "deploy/kubernetes/components"
NAMESPACE = "pdserve"
_POOLS = ("prefill", "decode")
# Go's format of a MicroTime, always with six digits.
_MICRO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
_PATH = re.compile(
    r"/apis?/(?:(?P<group>[\w.-]+)/)?(?P<version>v\w+)/namespaces/pdserve"
    r"/(?P<plural>\w+)(?:/(?P<name>[\w.-]+))?(?P<sub>/scale|/status)?"
)
_REASONS = {403: "Forbidden", 404: "NotFound", 409: "Conflict", 422: "Invalid"}
_VERBS = {"GET": "get", "PATCH": "patch", "POST": "create", "DELETE": "delete"}


Right = tuple[str, str, tuple[str, ...]]


def rights_of(role: dict[str, Any]) -> set[Right]:
    """Return the rights that a Role grants."""
    return {
        (verb, resource, tuple(rule.get("resourceNames", ())))
        for rule in role["rules"]
        for verb in rule["verbs"]
        for resource in rule["resources"]
    }


def rights_in(component: str) -> set[Right]:
    """Return the rights that the Role of a component in deploy/kubernetes grants."""
    texts = [path.read_text("utf-8") for path in (_COMPONENTS / component).glob("*.yaml")]
    documents = [x for text in texts for x in yaml.load_all(text, yaml.CSafeLoader)]
    (role,) = (x for x in documents if x["kind"] == "Role")
    return rights_of(role)


class KubernetesApi:
    """The API. State: objects by type and name; `writes`, all writes in order; `rights` of every
    client: verb, type, and names if not all; `races`, the number of next writes that lose a race
    against another client."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.writes: list[tuple[str, str, dict[str, Any]]] = []
        self.rights: set[Right] = set()
        self.races = 0
        self._versions = itertools.count(1)

    def add(self, plural: str, name: str, **spec: object) -> None:
        metadata = {"name": name, "namespace": NAMESPACE}
        self.objects[plural, name] = {"metadata": metadata, "spec": spec}
        self.touch(plural, name)

    def add_pod(self, name: str, labels: Mapping[str, str], **status: object) -> None:
        self.add("pods", name, containers=[])
        self.objects["pods", name]["metadata"]["labels"] = dict(labels)
        self.objects["pods", name]["status"] = status

    def touch(self, plural: str, name: str) -> None:
        """Change an object as another client would."""
        self.objects[plural, name]["metadata"]["resourceVersion"] = str(next(self._versions))

    def listed(self, plural: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the objects of one type that match the labels of a query."""
        labels = dict(x.split("=") for x in query.get("labelSelector", "").split(",") if x)
        found = [x for (kind, _), x in self.objects.items() if kind == plural]
        return [x for x in found if labels.items() <= x["metadata"].get("labels", {}).items()]

    def replicas(self, name: str, plural: str = "deployments") -> int:
        replicas: int = self.objects[plural, name]["spec"]["replicas"]
        return replicas

    def written(self, plural: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the name and the change of each write of one type."""
        return [(name, change) for kind, name, change in self.writes if kind == plural]

    async def answer(self, request: web.Request) -> web.Response:
        found = _PATH.fullmatch(request.path)
        if found is None:
            return _refused(404, f"no such path: {request.path}")
        plural, name, sub = found["plural"], found["name"], found["sub"] or ""
        kind, verb, is_scale = plural + sub, _VERBS[request.method], sub == "/scale"
        if verb == "get" and name is None:
            verb = "list"
        may = [names for v, k, names in self.rights if (v, k) == (verb, kind)]
        if not any(not names or name in names for names in may):
            group = found["group"] or ""
            return _refused(
                403,
                f'{plural}.{group} "{name}" is forbidden: User "system:serviceaccount:pdserve:'
                f'pdserve-scaler" cannot {verb} resource "{kind}" in API group "{group}"',
            )
        body = await request.json() if request.can_read_body else {}
        if verb == "create":
            name = body["metadata"]["name"]
            if (plural, name) in self.objects:
                return _refused(409, f'{plural} "{name}" already exists')
            self.add(plural, name, **body.get("spec", {}))
            self.objects[plural, name] = body | {
                "metadata": body["metadata"] | self.objects[plural, name]["metadata"]
            }
        if verb == "list":
            return web.json_response({"items": self.listed(plural, request.query)})
        if (plural, name) not in self.objects:
            return _refused(404, f'{plural} "{name}" not found')
        if verb == "patch":
            assert request.content_type == "application/merge-patch+json"
            if self.races and plural != "leases":
                self.races -= 1
                self.touch(plural, name)
            if refused := self._patch(kind, plural, name, body):
                return refused
        if verb == "delete":
            self.writes.append((kind, name, {}))
            return web.json_response(self.objects.pop((plural, name)))
        return web.json_response(self._shown(plural, name, is_scale=is_scale))

    def _patch(self, kind: str, plural: str, name: str, change: Any) -> web.Response | None:
        stored = self.objects[plural, name]
        version = change.get("metadata", {}).get("resourceVersion")
        if version not in (None, stored["metadata"]["resourceVersion"]):
            return _refused(409, f'Operation cannot be fulfilled on {plural} "{name}"')
        # A write to a subresource changes only its part; a write to the object changes the rest.
        parts = {"status"} if kind.endswith("/status") else change.keys() - {"status"}
        change = {key: x for key, x in change.items() if key in parts}
        for key in ("renewTime", "acquireTime"):
            value = change.get("spec", {}).get(key)
            if value is not None and not _MICRO_TIME.fullmatch(value):
                return _refused(422, f"{key} is no MicroTime")
        _merge(stored, change)
        self.touch(plural, name)
        self.writes.append((kind, name, change))
        return None

    def _shown(self, plural: str, name: str, *, is_scale: bool) -> dict[str, Any]:
        stored = self.objects[plural, name]
        if not is_scale:
            return stored
        # As in Kubernetes, fields with the value 0 are absent.
        replicas = stored["spec"]["replicas"]
        spec = {"replicas": replicas} if replicas else {}
        return {"apiVersion": "autoscaling/v1", "kind": "Scale", **stored, "spec": spec}


@asynccontextmanager
async def kubernetes_api(folder: Path) -> AsyncIterator[tuple[KubernetesApi, Path]]:
    """Serve an empty API on a free port. Yield it and a kubeconfig for it."""
    api = KubernetesApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [
                {"name": "test", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
            ],
            "clusters": [{"name": "c", "cluster": {"server": f"http://{host}:{port}"}}],
            "users": [{"name": "u", "user": {}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        yield api, path
    finally:
        await runner.cleanup()


def add_service(api: KubernetesApi, **spec: object) -> None:
    """Add a PDService, the templates of its pools, and the rights of the operator."""
    for pool in _POOLS:
        labels = {"app.kubernetes.io/component": pool}
        pod = {"containers": [{"name": "worker", "image": "v1", "args": ["worker"]}]}
        api.add(
            "deployments",
            f"pdserve-{pool}",
            replicas=1,
            selector={"matchLabels": dict(labels)},
            template={"metadata": {"labels": dict(labels)}, "spec": pod},
        )
    pools = {x: {"deployment": f"pdserve-{x}", "replicas": 1, "canary": 1} for x in _POOLS}
    rules = {"stepSeconds": 20, "minRequests": 10, "tolerancePercent": 2, "readySeconds": 600}
    api.add(
        "pdservices", "demo", **{"model": "demo", "steps": [50], **pools, **rules, **deepcopy(spec)}
    )
    service = api.objects["pdservices", "demo"]
    service |= {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDService"}
    service["metadata"]["uid"] = "u1"
    api.rights = rights_in("operator")


def change_image(api: KubernetesApi, image: str, *pools: str) -> None:
    """Change the image in the templates of these pools, or of both, as another client would."""
    for pool in pools or _POOLS:
        spec = api.objects["deployments", f"pdserve-{pool}"]["spec"]
        spec["template"]["spec"]["containers"][0]["image"] = image


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    """Apply a JSON merge patch (RFC 7396)."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict):
            _merge(into.setdefault(key, {}), value)
        else:
            into[key] = value


def _refused(code: int, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    status |= {"message": message, "reason": _REASONS[code]}
    body = json.dumps({**status, "code": code}).encode()
    return web.Response(body=body, status=code, content_type="application/json")
