"""An error in one sentence, for what other libraries raise."""


def error_sentence(error: BaseException) -> str:
    """What an error says; the lines after it are advice or a traceback. An `OSError` says enough without its type."""
    line = str(error).strip().partition("\n")[0]
    return line if line and isinstance(error, OSError) else f"{type(error).__name__}: {line}".rstrip(": ")
