"""One worker of small trainings with eager and compiled layers: `compiled_pair.py MODEL OUT`, started as by torchrun.

The first worker writes the losses to OUT. Layers are traced as for inductor; no code is generated.
"""

import json
import sys
from pathlib import Path

import torch
from training_pair import losses, recipe_on, trained

from mbd_core.multitf.step import compute as layer_compilation
from mbd_core.multitf.step.workers import torchrun_workers


def main() -> None:
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    layer_compilation.BACKEND = "aot_eager"
    results = {}
    with torchrun_workers() as workers:
        for sharding in ("replicated", "sharded"):
            for compiled in (False, True):
                recipe = recipe_on(model, steps=3, optimizer="adamw", compile=compiled)
                results[f"{sharding} {'compiled' if compiled else 'eager'}"] = losses(
                    trained(recipe, workers, sharding)
                )
        if workers.is_first:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
