"""Formats of tool calls, one file each; importing this registers them all."""

from tito_core.parsing.formats import hermes

__all__ = ["hermes"]
