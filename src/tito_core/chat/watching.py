"""An environment that renders with opaque content what was compiled for the tracing one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import Environment, Undefined
from jinja2.runtime import Context, new_context

from tito_core.chat.environment import TracingEnvironment
from tito_core.chat.filters import SELECTING
from tito_core.chat.opaque import NOT_KNOWN, Leaf, Opaque, Watch, joined
from tito_core.chat.traced import as_text, concat

_TYPE_TESTS = frozenset(
    (
        "defined",
        "undefined",
        "none",
        "boolean",
        "integer",
        "float",
        "number",
        "string",
        "mapping",
        "iterable",
        "sequence",
    )
)
"""Tests that ask for nothing but a type."""
_COMPARING = frozenset({"eq", "equalto", "==", "ne", "!=", "in"})
"""Tests that are operators, which ask `Opaque` themselves."""
_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith"})
_CHOOSING = frozenset({*SELECTING, "length", "count"})
"""Filters that hand on what a list or mapping holds, or count it."""


def watch_render(template: Any, variables: Mapping[str, Any], watch: Watch) -> tuple[str | Leaf, ...] | None:
    """Render with opaque content; None where the template does with it what is not followed.

    Args:
        template: A template that `environment.compile_template` gave.
        variables: As `environment.render` takes them, with content of `watch`.
        watch: Keeps what the template learns of it.
    """
    if template.blocks:  # they keep to the environment that they were compiled in
        return None
    environment = WatchingEnvironment(template.environment, watch)
    # Filters such as `select` look for tests in the environment of the context.
    context = new_context(environment, template.name, template.blocks, dict(variables), globals=template.globals)
    try:
        text = environment.concat(template.root_render_func(context, environment=environment))
    except Exception:  # a template is a program: what it makes of what is no text is its author's
        return None
    finally:
        context.vars.clear()
    return text.parts if type(text) is Opaque and not watch.refused else None


def _watched_test(name: str, test: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(test)
    def watched(*args: Any, **kwargs: Any) -> Any:
        found = _first((*args, *kwargs.values()))
        if found is None or name in _COMPARING:
            return test(*args, **kwargs)
        if name in _TYPE_TESTS and len(args) + len(kwargs) == 1:
            return found.is_a(test)
        return found.refuse(f"the test {name!r}")

    return watched


def _watched_filter(name: str, function: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    jinjas = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = (*args[jinjas:], *kwargs.values())
        if not any(map(_may_hold, given)):
            return function(*args, **kwargs)
        if _first(given) is None:
            return _of_many(name, function, watch, *args, **kwargs)
        if type(args[0]) is Opaque and not any(map(_may_hold, given[1:])):
            return _filtered(name, function, *args, **kwargs)
        watch.refuse(f"the filter {name!r}")

    return watched


def _filtered(name: str, function: Callable[..., Any], given: Opaque, *args: Any, **kwargs: Any) -> Any:
    """Do to opaque content what a filter does."""
    match name:
        case "default" | "d":
            return function(given, *args, **kwargs)
        case "trim":
            return given.strip(*args, **kwargs)
        case "tojson":
            return given.as_json(lambda value: function(value, *args, **kwargs))
        case "string" | "safe" if not args and not kwargs:
            return given.written()
    return given.refuse(f"the filter {name!r}")


def _of_many(name: str, function: Callable[..., Any], watch: Watch, *args: Any, **kwargs: Any) -> Any:
    """Do to what holds opaque content, or may, what a filter does."""
    if name in _CHOOSING:
        return function(*args, **kwargs)
    if name == "tojson" and _holds(args[0]) and not any(map(_may_hold, (*args[1:], *kwargs.values()))):
        return Opaque(watch, (Leaf(NOT_KNOWN),))
    watch.refuse(f"the filter {name!r}")


def _first(items: Iterable[Any]) -> Opaque | None:
    return next((item for item in items if type(item) is Opaque), None)


def _holds(value: Any) -> bool:
    """Tell whether a value that can become JSON is or holds opaque content."""
    return type(value) is Opaque or any(map(_holds, _inside(value)))


def _may_hold(value: Any) -> bool:
    """Tell whether a value is or holds opaque content, or nobody knows, such as of a generator."""
    known = isinstance(value, str | int | float | Undefined | dict | list | tuple | None)
    return not known or any(map(_may_hold, _inside(value)))


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


class WatchingEnvironment(TracingEnvironment):
    """Renders what was compiled for the other environment, with opaque content."""

    def __init__(self, watched: Environment, watch: Watch) -> None:
        super().__init__()
        self.extensions = watched.extensions
        self.filters = {name: _watched_filter(name, function, watch) for name, function in watched.filters.items()}
        tests: Mapping[str, Any] = watched.tests
        self.tests = {name: _watched_test(name, test) for name, test in tests.items()}
        self._watch = watch

    @staticmethod
    def text(value: Any) -> Any:
        """Write a value out."""
        return value.written() if type(value) is Opaque else as_text(value)

    @staticmethod
    def concat(pieces: Iterable[Any]) -> Any:
        """Join texts."""
        items = list(pieces)
        first = _first(items)
        return concat(items) if first is None else joined(first, items)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Hand out the methods of text that are followed."""
        if type(obj) is not Opaque:
            return super().getattr(obj, attribute)
        return getattr(obj, attribute) if obj.is_text and attribute in _METHODS else obj.refuse(attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Look into what is not opaque, by what is not: Jinja gives up without a word where an index is of no use."""
        found = _first((obj, argument))
        return super().getitem(obj, argument) if found is None else found.refuse("an index")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Format with `%`, which is not followed."""
        if any(map(_may_hold, (left, right))):
            self._watch.refuse(operator)
        return super().call_binop(context, operator, left, right)
