"""A command's stop: one signal, after which the command cleans up undisturbed."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt_on(*numbers: signal.Signals) -> None:
    """The first of these signals raises `KeyboardInterrupt`; later ones change nothing, as the command is stopping.

    A SIGHUP that is ignored, as under nohup, stays ignored. Only the main thread may call this; libraries may set
    their own handlers afterwards.
    """

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


@contextmanager
def any_stop_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the body as Ctrl-C does, so that it cleans up. Later signals do not disturb the cleaning.

    Outside of the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in STOPS}
    interrupt_on(*STOPS)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
