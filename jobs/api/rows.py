"""Rows that Python holds: lists of dictionaries, and the tables of pandas, polars, Arrow and Hugging Face's datasets.

Results are returned as a pandas table if pandas is installed, else as a list of dictionaries.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any


def rows_of(value: Any, noun: str) -> list[dict[str, Any]]:
    """The rows of a value as dictionaries. Raises `ValueError`, which calls the value `noun`, if it has no rows."""
    rows: Iterable[Any]
    if hasattr(value, "to_json") and hasattr(value, "columns"):  # pandas: to_json makes null of missing values
        rows = json.loads(value.to_json(orient="records", date_format="iso", double_precision=15))
    elif hasattr(value, "to_dicts"):  # polars
        rows = value.to_dicts()
    elif hasattr(value, "to_pylist"):  # Arrow
        from mbd_core.row_files.tables import check_names

        check_names(f"the columns of {noun}", getattr(value, "schema", ()))
        rows = value.to_pylist()
    elif isinstance(value, Mapping):
        names = ", ".join(map(str, list(value)[:5]))
        raise ValueError(f"{noun} are one object with {names}; give a list of rows, or one split of a data set")
    elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
        rows = value
    else:
        raise ValueError(f"{noun} are of type {type(value).__name__}; give a list of rows, a table, or a path")
    dictionaries = []
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{noun}, row {number}: a {type(row).__name__}, not a dictionary")
        dictionaries.append(dict(row))
    if not dictionaries:
        raise ValueError(f"{noun} have no row")
    return dictionaries


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a pandas table, or as a list of dictionaries if pandas is not installed."""
    if find_spec("pandas") is None:
        return [dict(row) for row in rows]
    import pandas

    return pandas.DataFrame.from_records(list(map(dict, rows)))


def names_of(value: Any, noun: str) -> list[str]:
    """The names in a list, or in one text with commas between them."""
    names = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(names, Iterable) or not all(isinstance(name, str | os.PathLike) for name in names):
        raise ValueError(f"{noun} must be a list of names, or one text with commas between them")
    return [part.strip() for name in names for part in os.fspath(name).split(",") if part.strip()]
