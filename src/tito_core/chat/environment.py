"""A Jinja environment that renders a chat template as transformers does and traces content through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tito_core.chat.traced import Traced, concat, conservative, join, mark_result, to_json


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to a call that keeps the traces (Jinja's own joins plain strings)."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat((")
        for arg in node.nodes:
            self.write("str(")
            self.visit(arg, frame)
            self.write("), ")
        self.write("))")


class _Generation(Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks assistant text, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own class attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by what it holds."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _TracingEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses; what plain `str` would make of content is marked as content."""

    code_generator_class = _Generator
    concat = staticmethod(concat)  # type: ignore[assignment]
    intercepted_binops = frozenset({"%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Format with `%`, which on a plain left string would lose what the right side is."""
        return mark_result(super().call_binop(context, operator, left, right), (left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a template's function; methods of plain strings (`', '.join(...)`) keep the traces too."""
        owner = getattr(obj, "__self__", None)
        if type(owner) is str and obj.__name__ == "join":
            return join(owner, *args)
        result = super().call(context, obj, *args, **kwargs)
        return mark_result(result, (owner, args, kwargs)) if isinstance(owner, str) else result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Keep the sandbox's safe `str.format` and mark what it makes of content."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None
        return lambda *args, **kwargs: mark_result(str.__str__(safe(*args, **kwargs)), (value.__self__, args, kwargs))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # transformers replaces Jinja's tojson, which escapes HTML, by json.dumps with these defaults.
    return to_json(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return join(d, [str(item) for item in items])


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def tracing_environment() -> Environment:
    """Make the environment, with transformers' settings, filters and globals."""
    environment = _TracingEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    for name, function in environment.filters.items():
        environment.filters[name] = conservative(function)
    environment.filters["tojson"] = _tojson
    environment.filters["join"] = _join
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def compile_template(source: str) -> Any:
    """Compile a chat template once; render it many times with `render`."""
    return tracing_environment().from_string(source)


def render(template: Any, variables: Mapping[str, Any]) -> Traced:
    """Render to a traced string.

    Raises:
        jinja2.TemplateError: The template refused the messages, with its own words.
    """
    text = concat(template.root_render_func(template.new_context(dict(variables))))
    return text if isinstance(text, Traced) else Traced.of(text, ())
