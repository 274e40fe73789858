"""A Jinja environment that renders a chat template as transformers does and traces content through it.

In text formatted with `%` or `format`, the format's own characters stay scaffold, and each inserted value keeps its
spans. Filters that templates use on content are traced precisely; results of other filters are all content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from string import Formatter
from typing import Any

from jinja2 import Environment, TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tito_core.chat.traced import Traced, as_text, concat, conservative, join, mark, mark_result

_PERCENT = re.compile(r"%(?:\((?P<key>[^()]*)\))?(?P<kind>.)", re.DOTALL)


def percent(layout: str, values: Any) -> str:
    """Return `layout % values` with its spans."""
    plain = str.__mod__(str.__str__(layout), values)
    return _checked(plain, _percent(layout, values), layout, values)


def braces(layout: str, plain: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return `plain`, the sandbox's `layout.format(*args, **kwargs)`, with its spans."""
    return _checked(plain, _braces(layout, args, kwargs), layout, args, kwargs)


def _checked(plain: str, traced: str | None, *origins: object) -> str:
    return mark(plain, *origins) if traced is None or str.__ne__(traced, plain) else traced


def _percent(layout: str, values: Any) -> str | None:
    in_order = iter(values if isinstance(values, tuple) else (values,))
    pieces, at = [], 0
    for directive in _PERCENT.finditer(layout):
        pieces.append(layout[at : directive.start()])
        at = directive.end()
        if directive["kind"] == "%":
            pieces.append("%")
        elif directive["kind"] != "s":
            return None
        else:
            pieces.append(as_text(next(in_order) if directive["key"] is None else values[directive["key"]]))
    return concat((*pieces, layout[at:]))


def _braces(layout: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    if isinstance(layout, Traced) and layout.spans:
        return None  # Formatter.parse returns plain strings
    pieces: list[str] = []
    unnamed = iter(args)
    for literal, field, layout_of_field, conversion in Formatter().parse(str.__str__(layout)):
        pieces.append(literal)
        if field is None:
            continue
        if layout_of_field or conversion or not (field == "" or field.isidentifier()):
            return None
        pieces.append(as_text(next(unnamed) if field == "" else kwargs[field]))
    return concat(pieces)


_PICKING = {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map"}
_CHOOSING = {"max", "min", "random", "reject", "rejectattr", "select", "selectattr", "slice", "sort", "unique"}
SELECTING = _PICKING | _CHOOSING
"""Filters that return items of their input unchanged and make no strings."""


def traced_filters() -> dict[str, Callable[..., Any]]:
    """Return all filters by name: Jinja's, and transformers' `tojson`."""
    return {name: function if name in SELECTING else _marking(function) for name, function in FILTERS.items()} | {
        "format": _format,
        "join": _join,
        "lower": lambda s: _traced(s).lower(),
        "replace": _replace,
        "safe": as_text,  # nothing is escaped in a chat template
        "string": as_text,
        "tojson": _tojson,
        "trim": lambda value, chars=None: _traced(value).strip(chars),
        "upper": lambda s: _traced(s).upper(),
    }


def _marking(function: Callable[..., Any]) -> Callable[..., Any]:
    return conservative(function, skip=1 if hasattr(function, "jinja_pass_arg") else 0)


def _traced(value: Any) -> Traced:
    """Return a value as `Traced`, whose methods also keep the spans of their arguments."""
    text = as_text(value)
    return text if isinstance(text, Traced) else Traced.of(text, ())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # transformers replaces Jinja's tojson, which escapes HTML, by json.dumps with these defaults.
    # If any string in it is content, all of it is: the brackets are part of the content's structure.
    pair = None if separators is None else tuple(separators)
    return mark(_encoder(ensure_ascii, indent, pair, sort_keys).encode(value), value)


@lru_cache(maxsize=64, typed=True)  # an indent of 2.0 is an error, also after one of 2
def _encoder(ensure_ascii: bool, indent: int | None, separators: Any, sort_keys: bool) -> json.JSONEncoder:
    """Cache the encoder that `json.dumps` makes on each call."""
    return json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return join(as_text(d), map(as_text, items))


def _replace(s: Any, old: str, new: str, count: int | None = None) -> str:
    return _traced(s).replace(as_text(old), as_text(new), -1 if count is None else count)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("The format filter takes positional or keyword arguments, not both.")
    return percent(as_text(value), kwargs or args)


_MAPPING_ATTRIBUTES = frozenset(dir(dict))
_TEXT_ATTRIBUTES = frozenset(dir(str))


class _Generator(CodeGenerator):
    """Compiles output and `a ~ b` to calls that keep the spans, where Jinja makes plain strings."""

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """Compile an item lookup in a dict to plain Python, because templates do little else."""
        owner, item = node.node, repr(node.attr)
        if not isinstance(owner, nodes.Name) or owner.name == "loop" or node.attr in _MAPPING_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        self.write("(")
        self.visit(owner, frame)
        self.write(f"[{item}] if type(")
        self.visit(owner, frame)
        self.write(f") is dict and {item} in ")
        self.visit(owner, frame)
        self.write(" else environment.getattr(")
        self.visit(owner, frame)
        self.write(f", {item}))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat((")
        for arg in node.nodes:
            self.write("environment.text(")
            self.visit(arg, frame)
            self.write("), ")
        self.write("))")


class _Generation(Extension):
    """Renders the body of `{% generation %}...{% endgeneration %}`, which marks assistant text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Render the block in a scope of its own, as transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("render"), [], [], body).set_lineno(line)

    def render(self, caller: Macro) -> str:
        """Return what the block renders to."""
        return caller()


_HARMLESS = (str, Namespace, LoopContext)


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with content traced through string operations."""

    code_generator_class = _Generator
    concat = staticmethod(concat)
    text = staticmethod(as_text)
    intercepted_binops = frozenset({"%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute; of a message, its items come first unless `dict` has an attribute of that name."""
        if isinstance(obj, Traced) and attribute not in _TEXT_ATTRIBUTES:
            return self.undefined(obj=obj, name=attribute)  # templates test `content.content is defined` on plain text
        if type(obj) is dict and attribute not in _MAPPING_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if isinstance(obj, _HARMLESS) and not attribute.startswith(("_", "format")):
            # The sandbox allows public attributes of these too, after slow checks.
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item. Jinja would fall back to attributes, and `Traced` has more of them than `str`."""
        if isinstance(obj, Traced) and isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply a binary operator; `%` on strings keeps the spans."""
        return percent(left, right) if isinstance(left, str) else super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a template's function; methods of plain strings (`', '.join(...)`) keep the spans too."""
        if type(obj) is Macro:  # the template's own macro: safe, and needs only the escaping context
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return obj(context.eval_ctx, *args, **kwargs)
        owner = getattr(obj, "__self__", None)
        if type(owner) is str:
            obj = getattr(Traced.of(owner, ()), obj.__name__)
        result = super().call(context, obj, *args, **kwargs)
        return mark_result(result, (owner,)) if isinstance(owner, bytes) else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's safe `str.format` with spans, or None for other callables."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def traced_format(*args: Any, **kwargs: Any) -> str:
            plain = str.__str__(safe(*args, **kwargs))
            named = args[0] if value.__name__ == "format_map" else kwargs
            return braces(value.__self__, plain, args, named)

        return traced_format


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def tracing_environment(now: datetime | None = None) -> Environment:
    """Make the environment, with transformers' settings, filters and globals.

    Args:
        now: The time for `strftime_now`, fixed for the life of the environment; by default the current time.
    """
    frozen = now or datetime.now()
    environment = TracingEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters.update(traced_filters())
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = frozen.strftime
    return environment


def compile_template(source: str, now: datetime | None = None) -> Any:
    """Compile a chat template once; render it many times with `render`.

    Raises:
        jinja2.TemplateSyntaxError: The source is not valid Jinja.
    """
    template = tracing_environment(now).from_string(source)
    template.globals = dict(template.globals)  # every context copies them; a dict copies faster
    return template


def render(template: Any, variables: Mapping[str, Any]) -> Traced:
    """Return the rendering as a traced string.

    Raises:
        Exception: Any exception of the template's code; `jinja2.TemplateError` if it refuses the messages.
    """
    context = template.new_context(dict(variables))
    try:
        text = concat(template.root_render_func(context))
    finally:
        context.vars.clear()  # break the reference cycle with macros, which would leave garbage every turn
    return text if isinstance(text, Traced) else Traced.of(text, ())
