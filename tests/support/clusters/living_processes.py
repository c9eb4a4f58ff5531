"""The living processes that belong to a folder: a Ray session's, or a supervisor's."""

from contextlib import suppress
from pathlib import Path


def living_with(folder: str) -> list[str]:
    """The commands of the processes that hold `folder` in their command line or environment, zombies left out."""
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            command, environment = ((process / name).read_bytes() for name in ("cmdline", "environ"))
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and folder.encode() in command + environment:
                commands.append(command.replace(b"\0", b" ").decode())
    return commands
