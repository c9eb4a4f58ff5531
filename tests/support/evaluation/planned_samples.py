"""Tables of planned samples, as a sweep gives them to its first stage."""

import json
from collections.abc import Sequence

import pyarrow as pa

from mbd_core.checkpoint.chat import question
from mbd_core.evaluation.sweep.parts import PLANNED_COLUMNS


def planned_samples(models: Sequence[str], *, prompts: Sequence[str], buffer_sizes: Sequence[int] = (1,)) -> pa.Table:
    """Every prompt under every buffer size for every model, at a threshold that random weights reach."""
    rows = [
        {
            "model": model,
            "method": "m",
            "task": "gsm-mini",
            "problem_id": f"p{number}",
            "prompt": prompt,
            "reference": "4",
            "entry_point": "",
            "config": json.dumps({"block_size": 4, "buffer_size": size, "tau_m2t": 0.05}),
            "input": json.dumps(question(prompt)),
            "stop": "[]",
            "max_tokens": 12,
            "may_shorten": False,
            "seed": 0,
        }
        for model in models
        for number, prompt in enumerate(prompts)
        for size in buffer_sizes
    ]
    return pa.Table.from_pylist([{"sample": i, **row} for i, row in enumerate(rows)], schema=PLANNED_COLUMNS)
