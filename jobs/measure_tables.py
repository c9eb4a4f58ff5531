"""The tables of measures in the documents: `python -m jobs.measure_tables > docs/reference/measures.md`."""

from collections.abc import Sequence
from typing import Any

from actors.serving.metrics import ENGINE_MEASURES, MODEL_MEASURES, REQUEST_MEASURES, ExportedMeasure
from mbd_core.tables import Table, markdown

OPENING = """What servers' processes export to Prometheus; [observability.md](observability.md) says how to scrape it.
The rows of `actors/serving/metrics.py` are the source: `python -m jobs.measure_tables > docs/reference/measures.md`
writes the page, and `tests/observability/test_metrics.py` compares both.

Each measure has the tag `model`, and in a Serve replica `application`, `deployment` and `replica`. Further tags stand
in brackets. A histogram has the suffixes `_bucket`, `_sum` and `_count`. **Ray moves each value of a histogram to the
middle of its bucket**: quantiles are good to a bucket, and a mean is not exact. Counters are exact."""
ENGINES = "One series for each replica."
GATEWAYS = """A choice is one answer to one prompt. `model` is empty where a request named no model that is served."""


def page() -> str:
    """The whole page, in Markdown."""
    tables = [
        _table("Engines", ENGINES, ENGINE_MEASURES),
        _table("Gateways", GATEWAYS, (*REQUEST_MEASURES, *MODEL_MEASURES)),
    ]
    return f"# Measures\n\n{OPENING}\n\n{markdown(tables)}"


def _table(title: str, lead: str, measures: Sequence[ExportedMeasure[Any]]) -> Table:
    rows = [
        [f"`{one.exported_name}`", one.kind + (f" [`{one.label}`]" if one.label else ""), one.help] for one in measures
    ]
    return Table(title=title, lead=(lead,), columns=("name", "type", "meaning"), rows=rows)


if __name__ == "__main__":
    print(page(), end="")
