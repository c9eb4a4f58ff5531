"""What follows the decoding of a batch, in processes without an engine."""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa


class Postprocess(Protocol):
    """What is done with a decoded table: a sweep grades it."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """A decoded table (`DECODED_COLUMNS`), processed."""

    def join(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The processed table of a part, from the processed tables of its samples."""
