"""Several sweeps that differ in their seed alone, as one table: mean and standard error over the seeds.

for s in 0 1 2; do python jobs/eval_sweep.py --models ... --seed $s --out out/seed-$s; done
python jobs/seed_table.py out/seed-0 out/seed-1 out/seed-2
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Key = tuple[str, str, str, str]


def load_rows(folder: Path) -> dict[Key, dict[str, Any]]:
    """A report's rows by model, method, task and the settings that tell its configurations apart."""
    path = folder / "report.json"
    if not path.exists():
        raise ValueError(f"{folder} has no report.json; run jobs/eval_sweep.py --out {folder}")
    rows = json.loads(path.read_text())["rows"]
    varied = [k for k in rows[0]["config"] if len({r["config"][k] for r in rows}) > 1]
    return {(r["model"], r["method"], r["task"], ", ".join(f"{k}={r['config'][k]}" for k in varied)): r for r in rows}


def spread(values: list[float]) -> str:
    """Mean and standard error of the mean."""
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values) / len(values) ** 0.5:.2f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="--out folders of sweeps, one a seed")
    folders = parser.parse_args(argv).folders
    if len(folders) < 2:
        parser.error("a spread needs at least two sweeps")
    found: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    try:
        for folder in folders:
            for key, row in load_rows(folder).items():
                found[key].append(row)
    except ValueError as error:
        parser.error(str(error))
    print("| model | method | task | config | n | Acc (%) | TPF | NFE |\n|---|---|---|---|---|---|---|---|")
    for (model, method, task, config), rows in found.items():
        if len(rows) != len(folders):
            parser.error(f"{model} {method} {task} {config} is in {len(rows)} of {len(folders)} sweeps")
        columns = (spread([r[name] for r in rows]) for name in ("accuracy", "tpf", "nfe"))
        n = sum(r["n"] for r in rows)
        print(f"| {model} | {method} | {task} | {config} | {n} | " + " | ".join(columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
