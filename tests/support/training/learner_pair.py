"""One worker of a learner over gloo: `learner_pair.py OUT`, with torchrun's environment variables.

Every worker reads OUT/answers.pt. The first one writes the reports, weights and states that the tests compare.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / folder) for folder in ("engine", "models")]

from small_engines import build  # noqa: E402  (where the path is known)

from mbd_core.multitf.config import LoraSettings, Sharding, TrainConfig  # noqa: E402
from mbd_core.multitf.step.learner import Learner  # noqa: E402
from mbd_core.multitf.step.objective import OBJECTIVES  # noqa: E402
from mbd_core.multitf.step.workers import ALONE, Workers, torchrun_workers  # noqa: E402

CASES: dict[str, tuple[str, Sharding, dict[str, Any]]] = {
    "replicated": ("LightningRL", "replicated", {}),
    "sharded": ("TraceRL", "sharded", {"optimizer": "muon", "micro_batch": 2}),
    "adapter": ("LightningRL", "sharded", {"lora": LoraSettings(rank=4, alpha=8, dropout=0.0), "pack": 900}),
    "tensor parallel": ("CJ-GRPO", "sharded", {"tensor_parallel": 2, "micro_batch": 3}),
}


def learner(name: str, workers: Workers = ALONE) -> Learner:
    """The learner of a case; alone it is neither sharded nor tensor-parallel."""
    objective, sharding, train = CASES[name]
    if workers.size == 1:
        train = {key: value for key, value in train.items() if key != "tensor_parallel"}
    settings = {"optimizer": "adamw", "lr": 2e-3, "warmup": 1, "schedule": "constant", "precision": "float32"}
    config = TrainConfig(steps=50, batch_size=8, **settings | train)
    return Learner(build(), config, OBJECTIVES[objective], workers=workers, sharding=sharding)


def learned(name: str, answers: Any, workers: Workers = ALONE) -> dict[str, Any]:
    """Two updates, what they report, the weights, the state; and the report of an update from that state."""
    one = learner(name, workers)
    reports = [one.update(answers).point() for _ in range(2)]
    state = one.state_dict()
    weights = one.weights()
    other = learner(name, workers)
    other.load_state_dict(state)
    expected, found = one.update(answers).point(), other.update(answers).point()
    return {"reports": reports, "weights": weights, "state": state, "expected": expected, "found": found}


def main() -> None:
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    answers = torch.load(out / "answers.pt", weights_only=False)
    with torchrun_workers() as workers:
        for name in CASES:
            results = learned(name, answers, workers)
            if workers.is_first:
                torch.save(results, out / f"{name}.pt")
            distributed.barrier()


if __name__ == "__main__":
    main()
