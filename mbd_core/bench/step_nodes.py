"""The nodes of a captured decoding step, counted without a GPU: `python -m mbd_core.bench.step_nodes`.

The step's own code runs on tensors that have shapes and no values (`shape_device.py`), with the kernels that a GPU of
compute capability 9.0 with torch and Triton gets. Each operation that computes something counts as one node. torch
launches more than one kernel for some of them (`SEVERAL`); such a step has more nodes than are counted.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mbd_core.bench.shape_device import shape_device
from mbd_core.bench.tables import markdown
from mbd_core.engine.build import build_parts
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.engine.graphs import static_step
from mbd_core.engine.step_kind import StepKind, Work
from mbd_core.models.decoder import Decoder
from mbd_core.models.model_config import ModelConfig
from mbd_core.models.shapes import SHAPES

WORKS = {
    "greedy": Work(),
    "T2T": Work(revises=True),
    "DMax": Work(revises=True, softens=True),
}
SEVERAL = frozenset({"addmm", "sort", "topk", "argsort", "cumsum", "cumprod", "nonzero_static"})
"""Operations for which torch launches more than one kernel, by their sizes."""


@dataclass(frozen=True, kw_only=True)
class StepNodes:
    """Nodes of one step, and of its last layer; the bytes of all tensors that the step makes."""

    step: Counter[str]
    layer: Counter[str]
    num_bytes: int

    @property
    def inexact(self) -> frozenset[str]:
        """The operations in it that are more than one node each."""
        return SEVERAL & set(self.step)


def step_nodes(
    config: ModelConfig, work: Work, *, num_rows: int = 1, num_slots: int = 2, num_asked: int | None = 48
) -> StepNodes:
    """The nodes of a static step in bfloat16; those of a layer are the difference that one more layer makes."""
    kind = StepKind(num_rows=num_rows, num_slots=num_slots, num_asked=num_asked, work=work)
    step, num_bytes = _count(config, kind)
    shorter, _ = _count(replace(config, num_layers=config.num_layers - 1), kind)
    return StepNodes(step=step, layer=step - shorter, num_bytes=num_bytes)


def _count(config: ModelConfig, kind: StepKind) -> tuple[Counter[str], int]:
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16).eval().requires_grad_(False)
    rows, slots = kind.num_rows, kind.num_slots
    sizes = EngineConfig(max_rows=rows, buffer_size=slots, num_pages=rows * 64, graphs=False)
    with shape_device() as device, torch.inference_mode():
        device.move(model)
        state = build_parts(model, sizes, vocab_limit=None).state
        device.nodes.clear()
        device.num_bytes = 0
        static_step(state, kind, num_pages=state.tables_RP.shape[1])
        return device.nodes.copy(), device.num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """0: counted; 2: bad input."""
    parser = argparse.ArgumentParser(prog="python -m mbd_core.bench.step_nodes", description=__doc__)
    parser.add_argument("--model", choices=sorted(SHAPES), default="llada2-mini")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--buffer", type=int, default=2, help="slots of each row")
    options = parser.parse_args(argv)
    if options.rows < 1 or options.buffer < 1:
        print(f"error: --rows {options.rows} --buffer {options.buffer}: both must be at least 1", file=sys.stderr)
        return 2
    config = SHAPES[options.model]
    asked = -(-3 * options.rows * options.buffer * config.block_size // 4)
    counted = {
        name: step_nodes(config, work, num_rows=options.rows, num_slots=options.buffer, num_asked=asked)
        for name, work in WORKS.items()
    }
    rows = [
        {
            "work": name, "layer": nodes.layer.total(), "step": nodes.step.total(),
            "inexact": ", ".join(sorted(nodes.inexact)) or None, "megabytes": nodes.num_bytes / 1e6,
        }
        for name, nodes in counted.items()
    ]  # fmt: skip
    columns = {"work": "work", "layer": "a layer", "step": "a step", "inexact": "of them inexact"}
    print(markdown(rows, columns | {"megabytes": "results (MB)|.1f"}), "\n")
    greedy = counted["greedy"]
    of_greedy = [{"node": name, "layer": greedy.layer[name], "step": n} for name, n in greedy.step.most_common()]
    print(markdown(of_greedy, {"node": "greedy: node", "layer": "a layer", "step": "a step"}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
