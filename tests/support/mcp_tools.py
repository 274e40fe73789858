"""An MCP server over stdio with one tool, which writes down that it ran: `python mcp_tools.py FILE`."""

from __future__ import annotations

import sys

try:
    from mcp.server.mcpserver import MCPServer
except ModuleNotFoundError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("wiper")


@server.tool()
def wipe(path: str = "/everything") -> str:
    """Wipe a path."""
    with open(sys.argv[1], "a") as ran:  # tools run side by side
        ran.write(path + "\n")
    return "wiped"


if __name__ == "__main__":
    server.run("stdio")
