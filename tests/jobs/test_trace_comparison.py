"""Two methods are recorded on the same prompts, with the slots that were asked for or that the model recommends."""

from pathlib import Path

import pytest

from jobs.trace_comparison import compared_decodings, record_run
from mbd_core.checkpoint.loading import load_model


def test_the_models_own_buffer_size_counts_if_it_is_multibd() -> None:
    def sizes(defaults: dict[str, object], buffer_size: int | None = None) -> list[int]:
        decodings = compared_decodings(defaults, {"tau_m2t": 0.8}, block_size=4, buffer_size=buffer_size)
        assert list(decodings) == ["SingleBD", "MultiBD"] and all(d.tau_m2t == 0.8 for d in decodings.values())
        return [d.buffer_size for d in decodings.values()]

    assert sizes({"buffer_size": 3}) == [1, 3]
    assert sizes({"buffer_size": 1}) == sizes({}) == [1, 4]
    assert sizes({"buffer_size": 3}, 2) == [1, 2]
    with pytest.raises(ValueError, match="SingleBD"):
        sizes({}, 1)


def test_a_recorded_run_is_its_requests(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = load_model(tiny_model_dir)
    decodings = compared_decodings({}, {"tau_m2t": 0.3}, block_size=model.config.block_size, buffer_size=2)
    prompts = [[5, 9, 14], [33, 21, 8, 77, 6]]
    for method, decoding in decodings.items():
        path = tmp_path / f"{method}.parquet"
        recorded = record_run(model, prompts, path, method=method, decoding=decoding, max_tokens=9)
        assert path.is_file() and recorded.run.detailed
        assert [r.request_id for r in recorded.run.requests] == ["0", "1"]
        forwards = [c.num_forwards for c in recorded.counts]
        assert forwards == [r.num_forwards for r in recorded.run.requests]
        assert recorded.settings[f"{method} forwards"] == sum(forwards)
