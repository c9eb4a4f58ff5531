"""An autoregressive model's forward and step in the engine, beside transformers' forward of the same tokens.

Every forward follows `prefix` stored tokens and gives logits at all its tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.measuring import Times, interleaved, median_times, timed
from mbd_core.checkpoint.folder import read_folder
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import Dtype, EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.batch import BatchRows, pack
from mbd_core.serving.tokens.load import LoadedModel, engine_dtype, load_engine

CASES = ((1, 1), (1, 8), (1, 16), (1, 32), (8, 1))
"""Rows, and new tokens of each."""
COLUMNS = {
    "dtype": "dtype",
    "rows": "rows",
    "tokens": "tokens of each",
    "forward": "forward (ms)|.2f",
    "transformers": "transformers' forward (ms)|.2f",
    "forward_ratio_wall": "forward / transformers'|.2f",
    "forward_ratio_processor": "in processor time|.2f",
    "step_ratio_wall": "step / forward|.3f",
    "step_ratio_processor": "in processor time|.3f",
}


def measure_forwards(
    folder: Path,
    dtype: Dtype,
    *,
    prefix: int,
    repeats: int,
    cases: Sequence[tuple[int, int]] = CASES,
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """A row for each case, medians of `repeats` rounds in which step, forward and transformers take turns.

    Steps decode one token of each row. If `dtype` is int8, transformers computes in the dtype of `auto`. Raises
    `ValueError` for a model that is not autoregressive.
    """
    contents, cpu = read_folder(folder), torch.device("cpu")
    if contents.config.has_mask:
        raise ValueError(f"--model {folder.name} decodes in blocks: transformers has no forward of it to compare")
    wide = engine_dtype("auto" if dtype == "int8" else dtype, contents, cpu)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=wide).eval()
    rows = []
    with load_engine(folder, EngineConfig(dtype=dtype, max_rows=max(r for r, _ in cases)), device=cpu) as loaded:
        for num_rows, tokens in cases:
            runs = {"transformers": _by_transformers(network, num_rows, prefix, tokens)}
            if tokens == 1:
                runs |= _decoding(loaded, num_rows, prefix, repeats)
            else:
                runs["forward"] = _forward_after(loaded.engine, prefix, tokens)
            times = median_times(interleaved({n: timed(f) for n, f in runs.items()}, repeats=repeats, after=tick))
            loaded.engine.abort_all()
            row = {"dtype": dtype, "rows": num_rows, "tokens": tokens}
            rows.append({**row, **{name: each.wall for name, each in times.items()}, **_ratios(times)})
    return rows


def _ratios(times: Mapping[str, Times]) -> dict[str, float]:
    pairs = {"forward": ("forward", "transformers"), "step": ("step", "forward")}
    return {
        f"{name}_ratio_{clock}": getattr(times[of], clock) / getattr(times[to], clock)
        for name, (of, to) in pairs.items()
        if of in times
        for clock in ("wall", "processor")
    }


def _by_transformers(network: PreTrainedModel, rows: int, prefix: int, tokens: int) -> Callable[[], object]:
    with torch.inference_mode():
        cache = network(torch.ones((rows, prefix), dtype=torch.int64), use_cache=True).past_key_values
    new = torch.ones((rows, tokens), dtype=torch.int64)

    @torch.inference_mode()
    def forward() -> None:
        network(new, past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return forward


def _decoding(loaded: LoadedModel, rows: int, prefix: int, steps: int) -> dict[str, Callable[[], object]]:
    """The engine's step with `rows` requests whose prompts are stored, and the bare forward of its last batch."""
    engine = loaded.engine
    for row in range(rows):
        engine.add(
            Request(
                request_id=str(row),
                prompt=(row + 1,) * prefix,
                max_tokens=steps + 3 * rows + 8,
                decoding=loaded.decoding({}),
                ignore_eos=True,
            )
        )
    engine.step()
    while (batch := engine.runner.last_batch) is None or batch.num_logits < rows or batch.max_q > 1:
        engine.step()
    return {"step": engine.step, "forward": lambda: engine.runner.logits(engine.runner.forward(_last(engine)))}


def _last(engine: Engine) -> Any:
    assert engine.runner.last_batch is not None
    return engine.runner.last_batch


def _forward_after(engine: Engine, prefix: int, tokens: int) -> Callable[[], object]:
    """The bare forward of one causal row after `prefix` keys of any value."""
    end = prefix + tokens
    rows = BatchRows(
        tokens_T=torch.ones(tokens, dtype=torch.int64),
        positions_T=torch.arange(prefix, end),
        lengths_K=tokens,
        kv_lens_K=torch.tensor([end]),
        pages_KP=torch.arange(1, 1 + -(-end // engine.page_size))[None],
        stored_K=torch.tensor([True]),
        logits_at_A=torch.arange(tokens),
        causal_K=torch.tensor([True]),
    )
    batch = pack([rows], page_size=engine.page_size)
    return lambda: engine.runner.logits(engine.runner.forward(batch))
