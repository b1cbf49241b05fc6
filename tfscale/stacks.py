"""Where the program is, shown when others wait for this rank."""

from __future__ import annotations

import faulthandler
import signal

_STDERR = 2
# Of the real-time signals, which Python and launchers leave alone, none that glibc uses itself.
_SIGNAL = signal.SIGRTMAX - 6


def show_on_signal() -> int:
    """Let a signal write the Python stacks of all threads to stderr; return its number.

    The handler is C code that needs no lock of the interpreter, so it also works while the main
    thread is in a call that never returns.
    """
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True)
    return int(_SIGNAL)
