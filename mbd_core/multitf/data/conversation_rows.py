"""Rows of a user's files: JSON lines, Parquet, Hugging Face datasets on disk; each a conversation with a name.

Files are read one after another and row by row, here or at any URL that fsspec knows. A row is a list of messages
(`messages`, or ShareGPT's `conversations`) or a prompt and its response.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.errors import error_sentence
from mbd_core.json_text import parse_json
from mbd_core.multitf.data.encoding import is_empty

JSON_LINES = (".jsonl", ".jsonl.gz", ".ndjson")
SUFFIXES = (*JSON_LINES, ".json", ".parquet", ".arrow")
CHATS = ("messages", "conversations")
PAIRS = (("prompt", "response"), ("question", "answer"), ("instruction", "output"), ("problem", "solution"))
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ROWS_AT_ONCE = 256
"""Of a table so many rows are Python objects at once, whatever its batches are."""

Row = tuple[str, Mapping[str, Any]]
Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns that hold conversations: one of messages, or a pair of prompt and response.

    If rows need not be `answered`, they may lack the response, and their conversations end before it.
    """

    chat: str | None = None
    prompt: str | None = None
    response: str | None = None
    answered: bool = True

    def __post_init__(self) -> None:
        lacks = self.response is None and self.prompt is not None and self.answered
        is_alone = self.response is not None and self.prompt is None
        if lacks or is_alone or (self.chat is None) == (self.prompt is None):
            raise ValueError("name either the column of messages, or both the columns of prompt and response")

    @classmethod
    def of(cls, row: Mapping[str, Any], *, answered: bool = True) -> "Columns":
        """The columns by their usual names; `ValueError` lists those that are there."""
        for name in CHATS:
            if name in row:
                return cls(chat=name, answered=answered)
        for prompt, response in PAIRS:
            if prompt in row and (response in row or not answered):
                return cls(prompt=prompt, response=response, answered=answered)
        raise ValueError(
            f"its columns {', '.join(map(repr, row))} are no conversation: name the column of messages, or those of "
            "prompt and response"
        )

    def messages(self, row: Mapping[str, Any]) -> Messages:
        """The row's conversation, which ends with the answer; `ValueError` says what is wrong with it."""
        for name in filter(None, (self.chat, self.prompt, self.response if self.answered else None)):
            if row.get(name) is None:
                raise ValueError(f"it has no {name!r}")
        if self.chat is not None:
            return _check_turns(row[self.chat], answered=self.answered)
        assert self.prompt is not None
        turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        turns.append({"role": "user", "content": row[self.prompt]})
        if self.answered:
            assert self.response is not None
            turns.append({"role": "assistant", "content": row[self.response]})
        return _check_turns(turns, answered=self.answered)


def _check_turns(turns: Any, *, answered: bool) -> Messages:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not all(isinstance(t, Mapping) for t in turns):
        raise ValueError("its conversation is no list of messages, each with a role and a content")
    messages = _in_order_of_calls([_turn(turn, number) for number, turn in enumerate(turns, start=1)])
    if not answered:
        return _prompt(messages)
    if len(messages) < 2 or messages[-1]["role"] != "assistant" or messages[-2]["role"] == "assistant":
        raise ValueError("its conversation does not end with a user's message and the assistant's answer")
    if is_empty(messages[-1]):
        raise ValueError("its answer is empty")
    return messages


def _turn(turn: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message as a chat template takes it, as serving makes it of the same message."""
    role, calls = turn.get("role", turn.get("from")), turn.get("tool_calls")
    content = turn.get("content", turn.get("value"))
    if role not in ROLES or (calls and ROLES[role] != "assistant"):
        raise ValueError(f"its message {number} needs a role ({', '.join(sorted(ROLES))}); only an assistant calls")
    message: dict[str, Any] = {
        "role": ROLES[role],
        "content": _text("" if content is None and calls else content, number),
    }
    if calls:
        message["tool_calls"] = [_call(call, number) for call in calls]
    if turn.get("tool_call_id") is not None and message["role"] == "tool":
        message["tool_call_id"] = turn["tool_call_id"]
    return message


def _text(content: Any, number: int) -> str:
    """A content that is a text, or a list of text parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in parts
    ):
        raise ValueError(f"its message {number} needs a content that is text, or a list of text parts")
    return "".join(part["text"] for part in parts)


def _call(call: Any, number: int) -> dict[str, Any]:
    """A call whose arguments are an object, or its text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"its message {number} has a call whose arguments' text")
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not isinstance(arguments, dict)
    ):
        raise ValueError(f"its message {number} has a call without a function's name and its arguments, an object")
    id_field = {} if call.get("id") is None else {"id": call["id"]}
    return {**id_field, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _in_order_of_calls(messages: Messages) -> Messages:
    """Results of calls in the order of the calls, where both have ids: templates show none."""
    results: Messages = []
    places: dict[str, int] = {}
    for message in messages:
        if message["role"] != "tool":
            places = {call["id"]: place for place, call in enumerate(message.get("tool_calls", ())) if "id" in call}
        elif "tool_call_id" in message and places:
            if message["tool_call_id"] not in places:
                raise ValueError(f"its result of {message['tool_call_id']!r} is of no call in the turn before")
            place_of_call = places[message["tool_call_id"]]
            index = len(results)
            while (
                index
                and results[index - 1]["role"] == "tool"
                and places.get(results[index - 1].get("tool_call_id", ""), -1) > place_of_call
            ):
                index -= 1
            results.insert(index, message)
            continue
        results.append(message)
    return results


def _prompt(messages: Messages) -> Messages:
    """The messages before the last answer, which need not be there."""
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError("its conversation does not end with a user's message, or with one and its answer")
    return prompt


def tools_of(row: Mapping[str, Any]) -> Tools:
    """The functions of a row's `tools`, a list or its JSON text, as serving shows them to a chat template."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = parse_json(tools, "its 'tools'")
    functions = []
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError("its 'tools' are no list of functions, each with a name")
        parameters = function.get("parameters")
        description = {} if function.get("description") is None else {"description": function["description"]}
        schema = {"type": "object", **(NO_PARAMETERS if parameters is None else parameters)}
        functions.append(
            {"type": "function", "function": {"name": function["name"], **description, "parameters": schema}}
        )
    return functions


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Make one sentence, a `ValueError`, of what cannot be read. One of ours is a sentence already."""
    try:
        yield
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except ValueError:
        raise
    except Exception as error:  # each storage raises types of its own
        raise ValueError(f"{path} cannot be read: {error_sentence(error)}") from None


def find_files(path: str, *, split: str | None = None) -> list[str]:
    """The data files at a path or URL, in order: the file itself, or those of a folder.

    Of a Hugging Face dataset that was saved to disk, the files of its `split`. Raises `ValueError` if there are none.
    """
    with _reading(path):
        system, root = fsspec.core.url_to_fs(path)
        if system.isfile(root):
            files = [root]
        elif not system.exists(root):
            raise ValueError(f"{path} does not exist")
        else:
            files = _folder_files(system, root, path, split)
    unknown = [name for name in files if not name.endswith(SUFFIXES)]
    if unknown or not files:
        source = unknown[0] if unknown else path
        raise ValueError(f"{source} holds no rows that can be read; supported: {', '.join(SUFFIXES)}")
    return [system.unstrip_protocol(name) if "://" in path else name for name in files]


def _folder_files(system: Any, root: str, path: str, split: str | None) -> list[str]:
    if system.exists(f"{root}/dataset_dict.json"):
        splits = parse_json(system.cat_file(f"{root}/dataset_dict.json"), f"{path}/dataset_dict.json")["splits"]
        if split is None and len(splits) > 1:
            raise ValueError(f"{path} has the splits {', '.join(splits)}; name one with --split")
        split_name = split or splits[0]
        if split_name not in splits:
            raise ValueError(f"{path} has no split {split_name!r}, only {', '.join(splits)}")
        root = f"{root}/{split_name}"
    elif split is not None:
        raise ValueError(f"{path} has no splits; leave --split out")
    if system.exists(f"{root}/state.json"):
        state = parse_json(system.cat_file(f"{root}/state.json"), f"{path}/state.json")
        return [f"{root}/{file['filename']}" for file in state["_data_files"]]
    names = sorted(name for name in system.find(root) if name.endswith(SUFFIXES))
    return [name for name in names if name.rpartition("/")[2] not in ("dataset_info.json", "state.json")]


def read_rows(files: Sequence[str], *, bad: Callable[[str, str], None] | None = None) -> Iterator[Row]:
    """Every row of the files with its name, as `data.jsonl line 3` or `data.parquet row 3`.

    Raises `ValueError` naming the file, and the line where there is one, that cannot be read. With `bad`, which takes
    its name and the reason, a line that is no row is passed to it instead.
    """
    for path in files:
        name = path.rpartition("/")[2]
        with _reading(path):
            if name.endswith(JSON_LINES):
                yield from _json_lines(path, name, bad)
            elif name.endswith(".json"):
                yield from _json_list(path, name)
            else:
                yield from _tables(path, name)


def _json_lines(path: str, name: str, bad: Callable[[str, str], None] | None) -> Iterator[Row]:
    with fsspec.open(path, "rb", compression="infer") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            source = f"{path} line {number}"
            try:
                row = _object(line, source)
            except ValueError as error:
                if bad is None:
                    raise
                bad(f"{name} line {number}", str(error).removeprefix(source).strip())
                continue
            yield f"{name} line {number}", row


def _json_list(path: str, name: str) -> Iterator[Row]:
    with fsspec.open(path, "rb") as file:
        content = file.read()
    try:
        rows = parse_json(content, path)
    except ValueError as error:
        raise ValueError(f"{error}; rows one a line are a .jsonl file") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} must be a list of objects")
    yield from ((f"{name} row {number}", row) for number, row in enumerate(rows, start=1))


def _object(line: bytes, source: str) -> Mapping[str, Any]:
    row = parse_json(line, source)
    if not isinstance(row, dict):
        raise ValueError(f"{source} must be a JSON object")
    return row


def _tables(path: str, name: str) -> Iterator[Row]:
    with fsspec.open(path, "rb") as file:
        number = 0
        for batch in (
            pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE) if path.endswith(".parquet") else _arrow_batches(file)
        ):
            for start in range(0, len(batch), ROWS_AT_ONCE):
                for row in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield f"{name} row {number}", row


def _arrow_batches(file: Any) -> Iterator[pa.RecordBatch]:
    """Arrow's stream format, which Hugging Face datasets have, or its file format."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    if not is_file:
        yield from pa.ipc.open_stream(file)
        return
    reader = pa.ipc.open_file(file)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
