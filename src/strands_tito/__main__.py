"""`tito`, or `python -m tito_core`: Ctrl-C ends it quietly from the first import to the last exit handler."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from types import FrameType, ModuleType

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it, where a command has none of its own."""


def main() -> None:
    """Run the command."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # such as nohup, which has it ignored
        _load().main()
        return
    # Registered first, so run last: from then on nothing of Python's runs that could wait for anything.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    _end_quietly(INTERRUPTED, "Interrupted.\n")  # an import that gets an exception may complain of it
    status = INTERRUPTED
    try:
        cli = _load()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cli.main()
        status = 0
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        raise
    finally:
        _end_quietly(status)


def _load() -> ModuleType:
    from strands_tito import cli

    cli.add_commands()
    return cli


def _end_quietly(status: int, sentence: str = "") -> None:
    """Let Ctrl-C end the process at once, from now on."""

    def end(_: int, __: FrameType | None) -> None:
        os.write(2, sentence.encode())
        os._exit(status)

    signal.signal(signal.SIGINT, end)


if __name__ == "__main__":
    main()
