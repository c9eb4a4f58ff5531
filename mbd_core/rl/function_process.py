"""The life of a function's process: it imports the function, says how the function is called, and asks it.

A line of JSON comes in for each question and goes out for each reply, on a socket. What the function prints goes to
standard error. This file imports little of the standard library, and nothing else, so that a process starts at once.

    form     the function's parameters                             it is called with
    answer   prompt, text, reference, problem_id: any of them      one answer
    verl     data_source, solution_str, ground_truth, extra_info   one answer; a dict's "score" counts
    lists    prompts, completions, reference, problem_id           the answers to one problem, as lists (TRL)
"""

import importlib.util
import inspect
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

CallStyle = Literal["answer", "verl", "lists"]
QuestionRows = list[dict[str, str]]
GIVEN: dict[CallStyle, tuple[str, ...]] = {
    "answer": ("prompt", "text", "reference", "problem_id"),
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "lists": ("prompts", "completions", "reference", "problem_id"),
}
HOW = (
    "write NAME(prompt, text, reference) for one answer, verl's NAME(data_source, solution_str, ground_truth, "
    "extra_info), or TRL's NAME(prompts, completions, reference, **columns)"
)
LINE_BYTES = 1 << 30  # of a question or a reply


class FunctionReply(TypedDict, total=False):
    """A reply to the question `id`: rewards, or an error.

    A plain function's reply also has the cost of its process: seconds of computing, its most bytes, and whether it
    computes on a GPU.
    """

    id: int
    rewards: list[Any]
    error: str
    computing_seconds: float
    bytes: int
    is_on_gpu: bool


class FunctionRefused(Exception):
    """The name is no function that can be asked; the message is the rest of a sentence that says why."""


class UserFunction:
    """MODULE:NAME or FILE.py:NAME: a function, a class that is built without arguments, or another callable."""

    def __init__(self, name: str) -> None:
        self._function = _found(name)
        call = type(self._function).__call__
        self.is_async = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(call)
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError:  # C code has no signature
            parameters = inspect.signature(lambda **_: None).parameters.values()
        kinds = inspect.Parameter
        names = [item.name for item in parameters if item.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
        takes_all = any(item.kind == kinds.VAR_KEYWORD for item in parameters)
        self.form: CallStyle = "lists" if "completions" in names else "verl" if "solution_str" in names else "answer"
        given = GIVEN[self.form]
        self._names = given if takes_all else tuple(name for name in given if name in names)
        required = [
            item.name
            for item in parameters
            if item.default is kinds.empty and item.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)
        ]
        missing = [item for item in required if item not in given or item not in names]
        if missing or not self._names:
            what = f"needs the parameter '{missing[0]}', which is not given" if missing else "takes no given parameter"
            raise FunctionRefused(
                f"{what}; it is called by name with {', '.join(given)}: {HOW.replace('NAME', _last(name))}"
            )

    def __call__(self, rows: QuestionRows) -> Any:
        """The function's result for these answers, which may be an awaitable."""
        return self._function(**{name: _argument(self.form, name, rows) for name in self._names})

    def rewards(self, value: Any, rows: QuestionRows) -> list[Any]:
        """A reward for each answer, from the function's result: a number, `None`, or a text that describes it."""
        if self.form != "lists":
            if self.form == "verl" and isinstance(value, Mapping) and "score" in value:
                value = value["score"]
            return [_number(value)]
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list | tuple) or len(values) != len(rows):
            size = f"{type(value).__name__} of {len(values)}" if hasattr(values, "__len__") else type(value).__name__
            raise FunctionRefused(f"gave a {size}, not a list of {len(rows)} rewards")
        return [_number(item) for item in values]


def _argument(form: CallStyle, name: str, rows: QuestionRows) -> Any:
    row = rows[0]
    if form == "lists":
        column = {"prompts": "prompt", "completions": "text"}.get(name, name)
        return [each[column] for each in rows]
    if form == "verl":
        extra = {"prompt": row["prompt"], "problem_id": row["problem_id"]}
        return {
            "data_source": row["task"],
            "solution_str": row["text"],
            "ground_truth": row["reference"],
            "extra_info": extra,
        }[name]
    return row[name]


def _number(value: Any) -> Any:
    if value is None:
        return None
    return float(value) if hasattr(value, "__float__") else str(value)[:200]


def _last(name: str) -> str:
    return name.rpartition(":")[2].rpartition(".")[2]


def _found(name: str) -> Callable[..., Any]:
    """The callable of that name. Raises whatever the user's module raises."""
    place, _, attributes = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found: Any = module
    for attribute in attributes.split("."):
        found = getattr(found, attribute)
    if isinstance(found, type):
        found = found()
    if not callable(found):
        raise FunctionRefused(
            f"is a {type(found).__name__}, which cannot be called; {HOW.replace('NAME', _last(name))}"
        )
    function: Callable[..., Any] = found
    return function


# The process.


def main(name: str, descriptor: int, seconds: float) -> None:
    """Answer questions until the socket closes. An `async def` function answers many at a time, in `seconds` each."""
    os.dup2(2, 1)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        function = UserFunction(name)
    except FunctionRefused as error:
        connection.sendall(_line({"error": str(error)}))
    except Exception as error:  # whatever the user's module raises
        connection.sendall(_line({"error": f"raised {_sentence(error)}"}))
    else:
        connection.sendall(_line({"is_async": function.is_async, "form": function.form}))
        if function.is_async:
            import asyncio

            asyncio.run(_answer_together(function, connection, seconds))
        else:
            _answer_in_turn(function, connection)


def _end_with(connection: socket.socket) -> None:
    """End this process and those that the function has started once nobody asks any more, also in the middle of an
    answer."""
    gone = select.poll()
    gone.register(connection, select.POLLRDHUP)
    gone.poll()
    os.killpg(os.getpid(), signal.SIGKILL)  # the asker made this process the leader of a group


def _answer_in_turn(function: UserFunction, connection: socket.socket) -> None:
    with connection, connection.makefile("rb") as questions:
        for line in questions:
            asked, began = json.loads(line), _computing_seconds()
            try:
                value = function(asked["rows"])
                if inspect.isawaitable(value):  # a plain function that returns a coroutine
                    import asyncio

                    value = asyncio.run(_awaited(value))
                reply: FunctionReply = {"rewards": function.rewards(value, asked["rows"])}
            except Exception as error:  # whatever the user's function raises
                reply = {"error": _failure(error, function)}
            spent: FunctionReply = {"computing_seconds": _computing_seconds() - began, **_memory()}
            connection.sendall(_line({"id": asked["id"], **reply, **spent}))


async def _answer_together(function: UserFunction, connection: socket.socket, seconds: float) -> None:
    import asyncio

    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)

    async def answer(asked: Any) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                value = await function(asked["rows"])
            reply: FunctionReply = {"rewards": function.rewards(value, asked["rows"])}
        except TimeoutError as error:
            what = f"did not answer within {seconds:g} s" if limit.expired() else _failure(error, function)
            reply = {"error": what}
        except Exception as error:  # whatever the user's function raises
            reply = {"error": _failure(error, function)}
        writer.write(_line({"id": asked["id"], **reply}))

    tasks = set()
    while line := await reader.readline():
        tasks.add(task := asyncio.create_task(answer(json.loads(line))))
        task.add_done_callback(tasks.discard)


async def _awaited(value: Any) -> Any:
    return await value


def _failure(error: Exception, function: UserFunction) -> str:
    if isinstance(error, FunctionRefused):
        return str(error)
    is_of_messages = function.form == "lists" and isinstance(error, TypeError)
    hint = " (completions are texts here, no lists of messages)" if is_of_messages else ""
    return f"raised {_sentence(error)}{hint}"


def _sentence(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    name = type(error).__name__
    return (f"{name}: {first}" if first else name)[:300]


def _computing_seconds() -> float:
    """Processor seconds of this process and of its children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _memory() -> FunctionReply:
    """The most bytes that this process has had, and whether it computes on a GPU."""
    torch = sys.modules.get("torch")
    is_on_gpu = torch is not None and torch.cuda.is_initialized()
    return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "is_on_gpu": is_on_gpu}


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
