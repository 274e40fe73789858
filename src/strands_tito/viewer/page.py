"""A page: one HTML file with its stylesheet, script and data, usable without a network."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

_SCRIPTS = ("elements.js", "columns.js", "scales.js", "path.js", "tokens.js", "detail.js", "ribbon.js", "tree.js")
_VIEWS = ("rollout.js", "compare.js", "charts.js", "collection.js", "main.js")
_ESCAPED = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"))
"""In JSON these characters occur in strings only. Escaped, no string can end the script element around it."""


class _Parts(NamedTuple):
    template: str
    style: str
    script: str
    policy: str


def page(view: str, data: Any, *, is_served: bool = False) -> bytes:
    """Return a page.

    Args:
        view: "rollout", "compare" or "collection".
        data: The view's data, which must encode to JSON.
        is_served: Whether the page may request more data from its own server.
    """
    parts = _parts(is_served)
    payload = as_inert_json({"view": view, "served": is_served, **data})
    filled = parts.template
    for name, value in (("policy", parts.policy), ("style", parts.style), ("script", parts.script)):
        filled = filled.replace(f"{{{{{name}}}}}", value, 1)
    before, after = filled.split("{{data}}")
    return before.encode() + payload + after.encode()


def as_inert_json(value: Any) -> bytes:
    """Return JSON in which `<`, `>` and `&` are escaped."""
    encoded = msgspec.json.encode(value)
    for character, escaped in _ESCAPED:
        encoded = encoded.replace(character, escaped)
    return encoded


def policy(is_served: bool) -> str:
    """Return the content security policy: the page's own script and style by hash, and `data:` images."""
    return _parts(is_served).policy


@cache
def _parts(is_served: bool) -> _Parts:
    folder = files(__package__) / "static"
    style = (folder / "style.css").read_text("utf-8")
    script = "\n".join((folder / name).read_text("utf-8") for name in (*_SCRIPTS, *_VIEWS))
    rules = [
        "default-src 'none'",
        f"script-src '{_hash(script)}'",
        f"style-src '{_hash(style)}'",
        "img-src data:",
        *(["connect-src 'self'"] if is_served else []),
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return _Parts((folder / "page.html").read_text("utf-8"), style, script, "; ".join(rules))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
