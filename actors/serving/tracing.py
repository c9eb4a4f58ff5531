"""OpenTelemetry spans of requests, where an exporter is configured by OpenTelemetry's own environment variables.

Ray Serve makes the spans: the HTTP proxy's, the gateway's, the call through its handle and the engine replica's are
one trace, which goes on with the client's where a `traceparent` header came. Serve calls `span_processors` in each of
its processes where `RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH` names it; where it does not, there are no spans.
"""

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from os import environ
from typing import Any

from opentelemetry import trace

log = logging.getLogger("ray.serve")

EXPORTER_VARIABLE, EXPORTER = "RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH", "actors.serving.tracing.span_processors"
RATIO_VARIABLE = "RAY_SERVE_TRACING_SAMPLING_RATIO"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


def exporter_name(variables: Mapping[str, str] = environ) -> str | None:
    """The configured exporter, as its package registers it; `None` where none is configured."""
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    name = variables.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(variables.get, ENDPOINTS)) else "none")
    if name == "none":
        return None
    protocol = next(filter(None, map(variables.get, PROTOCOLS)), "http/protobuf")
    return OTLP.get(protocol, protocol) if name == "otlp" else name


def serve_variables(variables: Mapping[str, str] = environ) -> dict[str, str]:
    """What the environment of a Ray cluster needs for Serve to make spans: nothing where no exporter is configured.

    Serve samples one trace in a hundred if it is not told otherwise; here all are kept but for
    `OTEL_TRACES_SAMPLER_ARG`, a share.
    """
    if exporter_name(variables) is None:
        return {}
    ratio = variables.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
    return {EXPORTER_VARIABLE: EXPORTER, RATIO_VARIABLE: ratio} | {
        name: variables[name] for name in (EXPORTER_VARIABLE, RATIO_VARIABLE) if name in variables
    }


def span_processors() -> list[Any]:
    """What Serve hands spans to: a batch at a time to the configured exporter.

    An exporter whose package is not installed is a warning, and its spans go nowhere.
    """
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = exporter_name()
    if name is None:
        return []
    registered = list(entry_points(group="opentelemetry_traces_exporter", name=name))
    if not registered:
        log.warning("no spans are sent: the exporter '%s' is not installed; pip install 'mbd-cluster[tracing]'", name)
        return []
    return [BatchSpanProcessor(registered[0].load()())]


def annotate(**attributes: str | int | float) -> None:
    """Give the span of the request under way attributes, `mbd.` before their names; nothing where there is no span."""
    trace.get_current_span().set_attributes({f"mbd.{name}": value for name, value in attributes.items()})
