"""OpenTelemetry spans of requests, if OpenTelemetry's own environment variables configure an exporter.

Ray Serve makes the spans. The HTTP proxy, the gateway, the call through its handle and the engine's replica make one
trace. It continues the client's trace if the request has a `traceparent` header. Serve calls `span_processors` in each
of its processes if `RAY_SERVE_TRACING_EXPORTER_IMPORT_PATH` names it; otherwise there are no spans.
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
    """The name under which the configured exporter is registered; `None` if no exporter is configured."""
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    name = variables.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(variables.get, ENDPOINTS)) else "none")
    if name == "none":
        return None
    protocol = next(filter(None, map(variables.get, PROTOCOLS)), "http/protobuf")
    return OTLP.get(protocol, protocol) if name == "otlp" else name


def serve_variables(variables: Mapping[str, str] = environ) -> dict[str, str]:
    """The environment variables with which a Ray cluster's Serve makes spans; empty if no exporter is configured.

    By default Serve samples one trace in a hundred. Here the ratio is `OTEL_TRACES_SAMPLER_ARG`, by default 1.
    """
    if exporter_name(variables) is None:
        return {}
    ratio = variables.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
    return {EXPORTER_VARIABLE: EXPORTER, RATIO_VARIABLE: ratio} | {
        name: variables[name] for name in (EXPORTER_VARIABLE, RATIO_VARIABLE) if name in variables
    }


def span_processors() -> list[Any]:
    """The processors of Serve's spans: batches go to the configured exporter.

    If the exporter's package is not installed, a warning is logged and spans are dropped.
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
    """Add attributes named `mbd.NAME` to the current request's span, if there is a span."""
    trace.get_current_span().set_attributes({f"mbd.{name}": value for name, value in attributes.items()})
