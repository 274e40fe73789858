"""`tito`, also as `python -m strands_tito`. Ctrl-C ends it without a traceback at any time, also during imports."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells, unless the command sets its own."""


def main() -> None:
    """Run the command."""
    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so under nohup, for example
    if is_ours:
        # Registered first, so it runs last; nothing that could block runs after it.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        _end_quietly(INTERRUPTED, "Interrupted.\n")  # a KeyboardInterrupt inside an import could print a traceback
    from strands_tito import cli

    cli.add_commands()
    status = INTERRUPTED
    try:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
        status = 0
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        raise
    finally:
        if is_ours:
            _end_quietly(status)


def _end_quietly(status: int, message: str = "") -> None:
    """Make Ctrl-C end the process at once from now on."""

    def end(_: int, __: FrameType | None) -> None:
        os.write(2, message.encode())
        os._exit(status)

    signal.signal(signal.SIGINT, end)


if __name__ == "__main__":
    main()
