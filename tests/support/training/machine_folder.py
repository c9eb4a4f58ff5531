"""A worker that takes part in writing a folder of its machine, and says what it saw.

`machine_folder.py OUT [SENTENCE]`: with a sentence, the writing fails with it.
"""

import json
import os
import sys
from pathlib import Path

from mbd_core.multitf.step.workers import torchrun_workers


def main() -> None:
    out, *sentence = sys.argv[1:]
    wrote = []

    def write(folder: Path) -> None:
        wrote.append(str(folder))
        if sentence:
            raise ValueError(*sentence)
        (folder / "file").write_text("whole")

    with torchrun_workers() as workers:
        try:
            with workers.folder_of_machine(write) as folder:
                report = {"folder": str(folder), "seen": (folder / "file").read_text()}
        except ValueError as error:
            report = {"seen": str(error)}
        Path(out, os.environ["RANK"]).write_text(json.dumps({**report, "wrote": wrote}))


main()
