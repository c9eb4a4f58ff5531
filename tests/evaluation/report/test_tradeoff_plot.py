"""The accuracy-TPF plot."""

from pathlib import Path

from sweep_rows import report_rows

from mbd_core.evaluation.report.tradeoff_plot import draw_plot


def test_the_plot_is_a_png(tmp_path: Path) -> None:
    draw_plot(report_rows(), tmp_path / "plot.png", labels={"a": "A", "b": "B"})
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
