"""A started engine listens on the loopback address only, with all its processes."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import psutil
import pytest

from support.real import Served

pytestmark = pytest.mark.engine


def tree_of(url: str) -> list[psutil.Process]:
    """Return the supervisor of the server at an address, and all its descendants."""
    port = urlsplit(url).port
    for supervisor in psutil.Process().children():
        tree = [supervisor, *supervisor.children(recursive=True)]
        if any(address.port == port for process in tree for address in listening(process)):
            return tree
    raise AssertionError(f"No child of this process listens on port {port}.")


def listening(process: psutil.Process) -> list[psutil._common.addr]:
    return [found.laddr for found in process.net_connections("inet") if found.status == psutil.CONN_LISTEN]


def test_every_listening_socket_is_on_loopback(served: Served) -> None:
    tree = tree_of(served.url)
    found = {(process.name(), *address) for process in tree for address in listening(process)}
    assert len(tree) >= 3, "the supervisor, the server, and at least one worker"
    assert [name for name in found if not ipaddress.ip_address(name[1]).is_loopback] == []
