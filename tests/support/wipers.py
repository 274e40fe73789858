"""One dangerous tool in each form that Strands accepts: decorated, a module file, and an MCP server over stdio."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters, stdio_client
from strands import tool
from strands.tools.mcp import MCPClient

KINDS = ("decorated", "module", "mcp")
_MODULE = """
TOOL_SPEC = {{
    "name": "wipe",
    "description": "Wipe a path.",
    "inputSchema": {{"json": {{"type": "object", "properties": {{"path": {{"type": "string"}}}}}}}},
}}


def wipe(tool, **kwargs):
    given = tool["input"]
    path = given.get("path", "/everything") if isinstance(given, dict) else "/everything"
    with open({ran!r}, "a") as ran:
        ran.write(path + "\\n")
    return {{"toolUseId": tool["toolUseId"], "status": "success", "content": [{{"text": "wiped"}}]}}
"""


@contextmanager
def wiper(kind: str, folder: Path) -> Iterator[tuple[list[Any], Path]]:
    """Yield the tools for an agent, and a file to which each run appends a line."""
    ran = folder / "ran.txt"
    ran.write_text("")
    if kind == "decorated":
        yield [_decorated(ran)], ran
    elif kind == "module":
        module = folder / "wipe.py"
        module.write_text(_MODULE.format(ran=str(ran)))
        yield [str(module)], ran
    else:
        server = str(Path(__file__).with_name("mcp_tools.py"))
        parameters = StdioServerParameters(command=sys.executable, args=[server, str(ran)])
        with MCPClient(lambda: stdio_client(parameters)) as client:
            yield list(client.list_tools_sync()), ran


def _decorated(ran: Path) -> Any:
    @tool
    def wipe(path: str = "/everything") -> str:
        """Wipe a path.

        Args:
            path: What to wipe.
        """
        with ran.open("a") as file:
            file.write(path + "\n")
        return "wiped"

    return wipe
