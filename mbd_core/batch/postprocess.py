"""The processing of decoded tables, in processes without an engine."""

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa


class Postprocess(Protocol):
    """Processes a decoded table. A sweep grades its rows."""

    def __call__(self, table: pa.Table) -> pa.Table:
        """A decoded table (`DECODED_COLUMNS`), processed."""

    def join(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The processed table of a part, from the processed tables of its samples."""
