"""How long a draft should be: exact answers of one slot, of two, and of as many of two as the engine measures
(`Verify.slots`). One request is decoded at a time, by each setting in turn."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.tables import Cell
from research.tables import table_lines

if TYPE_CHECKING:
    from mbd_core.batch.rows import PlannedRow

_EXACT = {"exact": True, "store": "causal", "lead": "causal"}
ONE, LENGTHS_FILE = "one slot", "lengths.parquet"
LENGTHS: dict[str, Mapping[str, Any]] = {
    ONE: {"buffer_size": 1, "verify": _EXACT},
    "two slots": {"buffer_size": 2, "verify": _EXACT},
    "measured": {"buffer_size": 2, "verify": {**_EXACT, "slots": "measured"}},
}
HEADS = ("Model", "Draft", "TPF", "Positions a token", "Tokens a second", "by round")


def timed_lengths(model: str, folder: Path, questions: Sequence["PlannedRow"], *, rounds: int) -> pa.Table:
    """A row for each setting and round, with its counts and seconds. An unmeasured round comes first.

    Seconds are the process's, which other processes hardly change, and the engines measure their forwards by them.
    Raises `ValueError` if an answer depends on the setting.
    """
    from mbd_core.batch.decoding import NoOutput, sample_requests
    from mbd_core.batch.decoding_model import DecodingModel
    from mbd_core.engine.config import EngineConfig
    from mbd_core.engine.engine import Engine
    from mbd_core.serving.tokens.load import load_engine

    config = EngineConfig(max_rows=1, buffer_size=2, prefix_caching=False)
    with load_engine(folder, config) as loaded:
        found = sample_requests(DecodingModel(loaded.engine, loaded.tokenizer), questions)
        requests = [request for request in found if not isinstance(request, NoOutput)]
        size, vocab_limit = loaded.engine.block_size, len(loaded.tokenizer)
        engines = {
            name: Engine(loaded.engine.model, config, vocab_limit=vocab_limit, clock=time.process_time)
            for name in LENGTHS
        }
        rows = []
        for number in tqdm(range(rounds + 1), desc=model, unit="round"):
            sums = {name: dict.fromkeys(("tokens", "forwards", "positions", "seconds"), 0.0) for name in LENGTHS}
            for request in requests:
                answers = set()
                for name, fields in LENGTHS.items():
                    asked = replace(request, decoding=decoding_config({}, fields, block_size=size))
                    began = time.process_time()
                    output = engines[name].generate([asked])[0]
                    sums[name]["seconds"] += time.process_time() - began
                    sums[name]["tokens"] += len(output.tokens)
                    sums[name]["forwards"] += output.counts.num_forwards
                    sums[name]["positions"] += output.counts.num_positions
                    answers.add(output.tokens)
                if len(answers) > 1:
                    raise ValueError(f"{model}: the answers to row {request.request_id} differ, though all are exact")
            named = {"model": model, "problems": len(questions), "round": number}
            rows += [{**named, "setting": name, **sums[name]} for name in LENGTHS if number]
    return pa.Table.from_pylist(rows)


def length_lines(timed: pa.Table) -> list[str]:
    """The table of the rows. Tokens a second are a multiple of one slot's: of all rounds, and of each alone."""
    rows: list[list[Cell]] = []
    found = timed.to_pylist()
    for model in dict.fromkeys(row["model"] for row in found):
        for name in LENGTHS:
            own, single = ([r for r in found if (r["model"], r["setting"]) == (model, n)] for n in (name, ONE))
            tokens, forwards, positions = (sum(r[f] for r in own) for f in ("tokens", "forwards", "positions"))
            ratios = [b["seconds"] / a["seconds"] for a, b in zip(own, single, strict=True)]
            ratio = sum(r["seconds"] for r in single) / sum(r["seconds"] for r in own)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append([model, name, f"{tokens / forwards:.2f}", f"{positions / tokens:.1f}", f"{ratio:.2f}", spread])
    return table_lines(HEADS, rows, num_text=2)
