"""`tito` as a user types it, in this process; its commands, which take long to build, are built once."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import typer
from typer.testing import CliRunner, Result

from strands_tito import cli


@cache
def command() -> Any:
    """Return the command with those that other packages add."""
    cli.add_commands()
    return typer.main.get_command(cli.app)


def tito(*words: object, **options: Any) -> Result:
    with mock.patch("typer.testing._get_command", return_value=command()):
        return CliRunner().invoke(cli.app, [str(word) for word in words], **options)
