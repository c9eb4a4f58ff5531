"""Strict schemas: a field that the API server would drop is an error.

Ray's kinds are described by the operator's custom resource definitions, which lie beside the project; Kubernetes' own
by the package kubernetes-validate; a PodMonitor by the few fields below that ours has.
"""

from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

Schema = dict[str, Any]
DROPPED = {"description", "example", "default", "nullable", "format"}  # and x-kubernetes-*: no words of JSON Schema

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
POD_MONITOR: Schema = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["selector", "podMetricsEndpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "matchLabels": TEXTS,
                        "matchExpressions": {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["key", "operator"],
                                "additionalProperties": False,
                                "properties": {
                                    "key": {"type": "string"},
                                    "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                                    "values": {"type": "array", "items": {"type": "string"}},
                                },
                            },
                        },
                    },
                },
                "podTargetLabels": {"type": "array", "items": {"type": "string"}},
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["port"],
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "interval": {"type": "string", "pattern": r"^\d+(ms|s|m)$"},
                        },
                    },
                },
            },
        },
    },
}


def strict(schema: Any) -> Any:
    """Kubernetes' structural schema as a JSON Schema that refuses fields that it does not name."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {k: v for k, v in schema.items() if k not in DROPPED and not k.startswith("x-kubernetes-")}
    if "properties" in result:
        result["properties"] = {name: strict(field) for name, field in result["properties"].items()}
    for word in ("items", "additionalProperties", "not", "allOf", "anyOf", "oneOf"):
        if word in result:
            result[word] = strict(result[word])
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    open_ended = "additionalProperties" in result or schema.get("x-kubernetes-preserve-unknown-fields")
    if "properties" in result and not open_ended:
        result["additionalProperties"] = False
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


@cache
def ray_schemas(folder: Path) -> dict[tuple[str, str], Draft202012Validator]:
    """The definitions of a folder by (apiVersion, kind)."""
    validators = {}
    for path in sorted(folder.glob("*.yaml")):
        spec = yaml.load(path.read_text(), Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object"}
            validators[f"{spec['group']}/{version['name']}", spec["names"]["kind"]] = Draft202012Validator(schema)
    return validators


def errors(validator: Draft202012Validator, document: Any) -> list[str]:
    errors_by_path = sorted(validator.iter_errors(document), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in errors_by_path]


def core_errors(document: Any) -> list[str]:
    """What Kubernetes' own schema of the newest version has against one of its kinds."""
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{'/'.join(map(str, error.path))}: {error.message[:200]}"]
    return []
