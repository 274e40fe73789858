"""Whether a chat template ends: it is rendered once in a process of its own, with limits, before it is certified.

Jinja's sandbox keeps a template from the machine, but not from its time and memory: `{{ 10**10**9 }}` is computed while
it is compiled. This file is that process's program too; it imports nothing of ours, so that it starts fast.
"""

import json
import logging
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

MOST_SECONDS = 5
"""Of the CPU, for all probes; a usual template takes a tenth of one."""
MOST_BYTES = 1 << 30
"""Of memory. macOS does not apply this limit, only that of the CPU."""
_WAIT_S = 120
_MEMORY = 3
logger = logging.getLogger(__name__)


def excess_of(source: str, variables: Mapping[str, Any], probes: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which limit a template exceeds, as a clause; None if none, or if no process can be started here.

    Args:
        source: Source of the template.
        variables: The template arguments.
        probes: Further variables of each rendering, such as its messages.
    """
    given = json.dumps([MOST_SECONDS, sys.path, source, dict(variables), probes], default=str)
    command = [sys.executable, "-I", "-S", __file__]
    try:
        ended = subprocess.run(command, input=given, text=True, capture_output=True, timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"does not end within {_WAIT_S} seconds"
    except OSError as error:
        logger.warning("error=<%s> | no process starts: time and memory of the chat template are not bounded", error)
        return None
    if ended.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"takes more than {MOST_SECONDS} seconds of CPU"
    return f"takes more than {MOST_BYTES >> 30} GiB of memory" if ended.returncode == _MEMORY else None


def _main() -> None:
    seconds, path, source, variables, probes = json.load(sys.stdin)
    for kind, most in (("CPU", seconds), ("AS", MOST_BYTES), ("CORE", 0)):
        with suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    sys.path[:] = path
    try:
        _render(source, variables, probes)
    except MemoryError:
        sys.exit(_MEMORY)
    except Exception:  # it is not valid, which certification says
        sys.exit()


def _render(source: str, variables: dict[str, Any], probes: list[dict[str, Any]]) -> None:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = datetime.now().strftime
    template = environment.from_string(source)
    for probe in probes:
        try:
            template.render(variables | probe)
        except MemoryError:
            raise
        except Exception:  # a template may raise any exception
            continue


if __name__ == "__main__":
    _main()
