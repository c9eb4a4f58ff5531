"""Runs one candidate program and its tests. Started by `sandbox.py` as `python -I sandbox_child.py RESULT_FD`.

The work order (JSON) comes on stdin, the verdict goes to the descriptor RESULT_FD, signed with the order's marker.
A program that ends the process, however it does so, leaves no signed verdict. Imports nothing of ours.
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
    except BaseException as error:  # SystemExit and KeyboardInterrupt are a candidate's failures too
        return "error", type(error).__name__
    return "passed", ""


def main() -> None:
    """Read the order, lose stdin, run, sign, end without running what the candidate may have left for the exit."""
    result_fd = int(sys.argv[1])
    write, leave = os.write, os._exit
    order = json.loads(sys.stdin.buffer.read())
    marker = order.pop("marker")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _limit(order)
    reason, detail = _verdict(order)
    write(result_fd, json.dumps({"marker": marker, "reason": reason, "detail": detail}).encode())
    leave(0)


if __name__ == "__main__":
    main()
