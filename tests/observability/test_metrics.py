"""What the exporters tell Ray: totals as rises, levels as they are, each sample once; exports outlive a failed one."""

import logging
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.serving import metrics
from actors.serving.metrics import ENGINE_MEASURES, MODEL_MEASURES, REQUEST_MEASURES, Exporter, ExportTimer
from jobs.measure_tables import page
from mbd_core.engine.measures import EngineCounts, EngineMeasures
from mbd_core.serving.server.measures import ServerMeasures

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "measures.md"
Series = dict[tuple[str, ...], list[float]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Series:
    """What was recorded, by name and tags, in place of Ray."""
    series: Series = defaultdict(list)

    class Metric:
        def __init__(self, name: str, **settings: Any) -> None:
            self._name, self._keys = name, settings["tag_keys"]

        def record(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self._keys)
            series[(self._name, *(tags[key] for key in self._keys))].append(value)

        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses this"
            self.record(value, tags)

        _record = set = observe = record

    monkeypatch.setattr(metrics, "metrics", SimpleNamespace(Counter=Metric, Gauge=Metric, Histogram=Metric))
    return series


def measures(counts: EngineCounts, **changes: Any) -> EngineMeasures:
    numbers = dict.fromkeys(EngineMeasures.__dataclass_fields__, 0) | {"counts": counts} | changes
    return EngineMeasures(**numbers)


def test_an_engine_is_exported(told: Series) -> None:
    counts = EngineCounts()
    now = [measures(counts, running=3)]
    exporter = Exporter(ENGINE_MEASURES, lambda: {"tiny": now[0]})
    exporter.export()
    assert told["mbd_num_preemptions", "tiny"] == [0]  # from the first moment on
    assert told["mbd_num_requests_running", "tiny"] == [3]

    counts.forwards["decode"] += 7
    counts.block_lifetimes.extend([4, 9])
    now[0] = measures(counts, preemptions=2, kv_usage=0.5, host_pages=3, pages_to_host=5, pages_from_host=4)
    exporter.export()
    exporter.export()
    assert told["mbd_num_preemptions", "tiny"] == [0, 2]
    assert told["mbd_host_cache_pages", "tiny"] == [0, 3, 3]
    assert told["mbd_pages_to_host", "tiny"] == [0, 5] and told["mbd_pages_from_host", "tiny"] == [0, 4]
    assert told["mbd_forward_passes", "tiny", "decode"] == [0, 7]
    assert told["mbd_forward_passes", "tiny", "store"] == [0]
    assert told["mbd_kv_cache_usage_perc", "tiny"] == [0, 0.5, 0.5]
    assert told["mbd_block_lifetime_steps", "tiny"] == [4, 9]


def test_requests_are_exported_by_model(told: Series) -> None:
    served = ServerMeasures(["tiny", "large"])
    exporter = Exporter(REQUEST_MEASURES, lambda: served.by_model)
    exporter.export()
    Exporter(MODEL_MEASURES, lambda: {"tiny": 2, "large": 0}).export()
    assert told["mbd_least_replicas", "tiny"] == [2] and told["mbd_least_replicas", "large"] == [0]
    served.by_model["tiny"].errors[418] += 1
    served.by_model["large"].finished["stop"] += 2
    served.by_model["large"].time_to_first_token.add(0.25)
    exporter.export()
    assert told["mbd_request_errors", "tiny", "418"] == [0, 1]
    assert told["mbd_request_errors", "", "404"] == [0]
    assert told["mbd_request_success", "large", "stop"] == [0, 2]
    assert told["mbd_request_success", "tiny", "stop"] == [0]
    assert told["mbd_time_to_first_token_seconds", "large"] == [0.25]


def test_a_failed_export_is_logged_and_followed_by_others(caplog: pytest.LogCaptureFixture) -> None:
    exported, twice = [], threading.Event()

    class Exporter:
        def export(self) -> None:
            exported.append(1)
            if len(exported) == 1:
                raise RuntimeError("once")
            twice.set()

    logging.getLogger("ray.serve").addHandler(caplog.handler)
    timer = ExportTimer(Exporter(), seconds=0.01)  # type: ignore[arg-type]
    assert twice.wait(60)
    timer.stop()
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == ["metrics could not be exported"]


def test_the_last_values_are_exported_at_the_end(told: Series) -> None:
    counts = EngineCounts()
    timer = ExportTimer(Exporter(ENGINE_MEASURES, lambda: {"tiny": measures(counts)}), seconds=3600)
    counts.committed_tokens = 5
    timer.stop()
    assert told["mbd_committed_tokens", "tiny"] == [0, 5]


def test_the_document_is_what_the_rows_say() -> None:
    text = DOCUMENT.read_text()
    assert text == page(), "write it anew: python -m jobs.measure_tables > docs/reference/measures.md"
    assert "| `ray_mbd_forward_passes_total` | counter [`kind`] |" in text
