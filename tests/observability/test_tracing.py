"""Which exporter OpenTelemetry's own variables choose, and what Serve is told of it."""

import logging

import pytest
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from actors.serving import tracing

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, None),
        (ENDPOINT, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"}, "otlp_proto_http"),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "otlp_proto_grpc"),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "otlp_proto_http"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "console"),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_standard_variables_choose_the_exporter(variables: dict[str, str], name: str | None) -> None:
    assert tracing.exporter_name(variables) == name
    assert bool(tracing.serve_variables(variables)) == (name is not None)


def test_serve_keeps_every_trace_unless_told_otherwise() -> None:
    path, ratio = tracing.EXPORTER_VARIABLE, tracing.RATIO_VARIABLE
    assert tracing.serve_variables(ENDPOINT) == {path: tracing.EXPORTER, ratio: "1.0"}
    assert tracing.serve_variables(ENDPOINT | {"OTEL_TRACES_SAMPLER_ARG": "0.1"})[ratio] == "0.1"
    own = {path: "elsewhere.processors", ratio: "0.5"}
    assert tracing.serve_variables(ENDPOINT | own) == own


def test_the_configured_exporter_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    (processor,) = tracing.span_processors()
    assert isinstance(processor.span_exporter, ConsoleSpanExporter)
    processor.shutdown()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracing.span_processors() == []


def test_an_exporter_that_is_not_installed_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "abacus")
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    assert tracing.span_processors() == []
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert "'abacus' is not installed" in caplog.text


def test_without_a_span_nothing_is_noted() -> None:
    tracing.annotate(tokens=3)
