"""Rows of small conversations, and files of rows."""

import json
from pathlib import Path


def chat(number: int, *, answer: str | None = None) -> dict:
    turns = [{"role": "system", "content": "Be brief."}] if number % 3 == 0 else []
    turns += [{"role": "user", "content": f"{number}+1?"}, {"role": "assistant", "content": f"{number + 1}"}]
    if number % 2:
        turns += [{"role": "user", "content": f"{number}+2?"}, {"role": "assistant", "content": f"{number + 2}"}]
    if answer is not None:
        turns[-1]["content"] = answer
    return {"messages": turns}


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
