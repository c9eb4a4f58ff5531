"""Rows of a study made by hand: cells whose answers are right, and take forwards, as often as a test says."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from research.ledger.rows import COLUMNS, StudyCell

NUM_TOKENS = 60


def study_table(
    accuracy: Mapping[StudyCell, float],
    forwards: Mapping[StudyCell, int],
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    problems: int = 40,
    random_seed: int = 0,
) -> pa.Table:
    """The answers of every cell to the same problems; one cell's right answers do not depend on the other cells."""
    rows = []
    for place, cell in enumerate(accuracy):
        rng = np.random.default_rng([random_seed, place])
        for seed in seeds:
            for number in range(problems):
                rows.append(
                    {
                        "recipe": cell.recipe,
                        "seed": seed,
                        "problem": f"ledger-mini/test/{seed}/{number}",
                        "buffer_size": cell.buffer_size,
                        "tau_m2t": cell.tau_m2t,
                        "correct": bool(rng.random() < accuracy[cell]),
                        "num_tokens": NUM_TOKENS,
                        "num_forwards": forwards[cell] + int(rng.integers(3)),
                    }
                )
    return pa.Table.from_pylist(rows, schema=COLUMNS)


def study_cells(recipes: Mapping[str, tuple[float, int]], *, taus: tuple[float, ...] = (0.8, 0.9)) -> pa.Table:
    """A table of whole recipes: each one's accuracy, and its forwards under SingleBD, which MultiBD has fewer of."""
    cells = [StudyCell(recipe, size, tau) for recipe in recipes for size in (1, 2) for tau in taus]
    return study_table(
        {cell: recipes[cell.recipe][0] for cell in cells},
        {cell: recipes[cell.recipe][1] // cell.buffer_size + round(20 * cell.tau_m2t) for cell in cells},
    )
