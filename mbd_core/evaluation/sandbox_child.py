"""Runs one candidate program and its tests. Started by `sandbox.py` as `python -I sandbox_child.py RESULT_FD`.

The work order (JSON) comes on stdin. The verdict, signed with the order's marker, goes to the descriptor RESULT_FD. A
program that ends the process itself leaves no signed verdict. This file imports nothing from the project.
"""

import json
import os
import resource
import sys
from typing import Any


def _limit(order: dict[str, Any]) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, order["cpu_seconds"]),
        (resource.RLIMIT_AS, order["memory_bytes"]),
        (resource.RLIMIT_FSIZE, order["file_bytes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _verdict(order: dict[str, Any]) -> tuple[str, str]:
    """Define the candidate, define the tests over it, and run them."""
    space: dict[str, Any] = {"__name__": "candidate"}
    try:
        exec(compile(order["program"], "<candidate>", "exec"), space)
        exec(compile(order["test"], "<tests>", "exec"), space)
        space["check"](space[order["entry_point"]])
    except AssertionError:
        return "wrong", "a test's assertion failed"
    except MemoryError:
        return "memory", "out of memory"
    except BaseException as error:  # a candidate may also raise SystemExit or KeyboardInterrupt
        return "error", type(error).__name__
    return "passed", ""


def main() -> None:
    """Read the order, detach stdin, run, write the verdict, and exit without the candidate's exit handlers."""
    result_fd = int(sys.argv[1])
    write, exit_now = os.write, os._exit  # the candidate may replace them
    order = json.loads(sys.stdin.buffer.read())
    marker = order.pop("marker")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _limit(order)
    reason, detail = _verdict(order)
    write(result_fd, json.dumps({"marker": marker, "reason": reason, "detail": detail}).encode())
    exit_now(0)


if __name__ == "__main__":
    main()
