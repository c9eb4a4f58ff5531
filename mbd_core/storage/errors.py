"""The errors of storages, in one sentence each."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mbd_core.proxies import connection_note


class TakenOver(RuntimeError):
    """Another process writes in a folder that this process had claimed."""


STORAGE_URL = "https://s3.amazonaws.com"  # where requests go, as far as the choice of a proxy depends on it


@contextmanager
def storage_errors(location: str, trouble: str, kind: Callable[[str], Exception] = OSError) -> Iterator[None]:
    """Turns the storage's error into one sentence: the folder, its trouble, the reason.

    A `ValueError` is a sentence of ours already.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # each storage raises types of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        note = connection_note(error, os.environ.get("AWS_ENDPOINT_URL", STORAGE_URL))
        raise kind(f"{location} {trouble}: {reason}{note}") from error
