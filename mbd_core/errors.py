"""Another library's error in one sentence. The lines after its first are advice or a traceback."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its class if it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def error_line(error: BaseException) -> str:
    """An error's class, and what it says."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def error_sentence(error: BaseException) -> str:
    """As `error_line`, but without the class of an `OSError`, which says enough."""
    return first_line(error) if isinstance(error, OSError) else error_line(error)
