"""A job's stop: one signal, after which the job cleans up undisturbed."""

import signal


def interrupt_on(*numbers: signal.Signals) -> None:
    """The first of these signals raises `KeyboardInterrupt`; those after it find that the job is stopping already.

    A SIGHUP that is ignored, as nohup leaves it, stays so. For the main thread; libraries may set their own handlers.
    """

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
