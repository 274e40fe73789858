"""A compiled chat template with its arguments: Strands messages in, traced text out.

The message format of a template is found by trying, because templates do not declare it. Templates run in the sandbox
that transformers uses, with its filters and globals, where string operations keep the spans of content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial, reduce
from itertools import combinations
from string import Formatter
from typing import Any, TypeVar

import jinja2
from jinja2 import Environment, TemplateSyntaxError, nodes, pass_environment
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from strands.types.content import Messages
from strands.types.tools import ToolSpec

from tito_core.chat.messages import REASONING_KEYS, MessageFormat, TemplateMessage, template_messages, template_tools
from tito_core.chat.probes import LOOK, user_message
from tito_core.chat.traced import UNKNOWN, Traced, as_text, concat, conservative, join, mark, mark_result, sources
from tito_core.ledger.errors import TITOError

T = TypeVar("T")


class TemplateError(TITOError, ValueError):
    """The chat template is missing, not supported, or refuses the messages."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Renders messages. Build it with `Rendering.of`; immutable.

    Attributes:
        variables: The tokenizer's special tokens and the template arguments, fixed for a rollout.
        message_format: The format of the messages that the template reads.
        default_tools: Tools for renderings of our own: empty, unless the template requires some.
        now: The time for `strftime_now`.
        nearest: Whether what the template refuses is shown in the nearest form that it takes; off while certifying.
    """

    compiled: Any
    variables: Mapping[str, Any]
    message_format: MessageFormat
    default_tools: tuple[ToolSpec, ...]
    now: datetime
    nearest: bool = False

    @classmethod
    def of(cls, source: str, variables: Mapping[str, Any], now: datetime | None = None) -> Rendering:
        """Compile a template and find its message format. `now` is the time for `strftime_now`.

        Raises:
            TemplateError: The source is not valid Jinja.
        """
        now = now or datetime.now()
        try:
            compiled = compile_template(source, now)
        except TemplateSyntaxError as error:
            raise TemplateError(f"The chat template is not valid Jinja: {error} (line {error.lineno}).") from error
        default = _default_tools(compiled, variables)
        render = partial(_run, compiled, variables, template_tools(default), False)
        return cls(compiled, variables, find_message_format(render), default, now)

    def of_messages(
        self,
        messages: Messages,
        system_prompt: str | None = None,
        tool_specs: Sequence[ToolSpec] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> Traced:
        """Render Strands messages; the trace source of each is its index.

        Raises:
            TemplateError: The template refuses the messages or drops one of them.
            UnsupportedContentError: A block cannot become text.
        """
        translated = template_messages(messages, system_prompt, message_format=self.message_format)
        tools = template_tools(tool_specs)
        return self.shown(translated, partial(self.of_translated, tools=tools, generation_prompt=generation_prompt))

    def shown(self, messages: list[TemplateMessage], show: Callable[[list[TemplateMessage]], T]) -> T:
        """Return what `show` makes of messages or, where it raises `TemplateError`, of their nearest form."""
        try:
            return show(messages)
        except TemplateError:
            for forms in _NEAREST if self.nearest else ():
                with suppress(TemplateError):
                    return show(reduce(lambda changed, form: form(changed), forms, messages))
            raise

    def of_translated(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> Traced:
        """Render template messages, as `template_messages` makes them; raises as `of_messages`."""
        try:
            text = _run(self.compiled, self.variables, tools, generation_prompt, messages)
        except Exception as error:  # a template may raise any exception
            reason = str(error).rstrip(".")
            raise TemplateError(
                f"The chat template refused messages with roles {_roles(messages)}: {reason}. Change the "
                "message that it refuses, or use another template."
            ) from error
        origins = {origin for _, _, origin in text.spans}
        for position, message in enumerate(messages):
            if not _is_shown(message, origins):
                raise TemplateError(
                    f"The chat template leaves out message {position} of messages with roles {_roles(messages)}. Use a "
                    f"template that renders the role {message['role']!r}."
                )
        return text


class _Inert(Traced):
    """Content in which a template finds nothing: what it spells is not the template's to refuse (law 6)."""

    __slots__ = ()

    def __contains__(self, text: object, /) -> bool:
        return False


def _hidden(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Hide what answers spell, since gpt-oss refuses one that spells a channel's header."""
    return [dict(map(_inert, each.items())) if each["role"] == "assistant" else each for each in messages]


def _inert(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    return key, _Inert(value, value.spans) if isinstance(value, Traced) else value


def _joined(role: str, messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Join questions, or results, to what is before them, since Mistral refuses a question there."""
    joined = messages[:1]
    for message in messages[1:]:
        if message["role"] == role and joined[-1]["role"] in ("tool", role):
            joined[-1] = {**joined[-1], "content": _both(joined[-1]["content"], message["content"])}
        else:
            joined.append(message)
    return joined


def _both(*contents: Any) -> Any:
    if all(isinstance(content, str) for content in contents):
        return join("\n\n", filter(None, contents))
    first, second = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents)
    return [*first, {"type": "text", "text": "\n\n"}, *second]


def _filled(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Fill empty answers, which Ministral refuses, and empty results, as Strands fills answers."""
    blank = Traced("[blank text]")
    return [each if each["content"] or "tool_calls" in each else {**each, "content": blank} for each in messages]


_FORMS: Sequence[Callable[..., Any]] = (_hidden, partial(_joined, "user"), partial(_joined, "tool"), _filled)
_NEAREST = [forms for size in range(1, len(_FORMS) + 1) for forms in combinations(_FORMS, size)]
"""Changes after which a template may show what it refuses, the fewest first."""


def _is_shown(message: TemplateMessage, origins: set[int]) -> bool:
    """Return whether a rendering shows a message, or the message is blank."""
    # A template that strips reasoning may show no text of an answer, so only its calls count.
    content = message.get("tool_calls") if message["role"] == "assistant" else message["content"]
    name = content[0]["function"]["name"] if message["role"] == "assistant" and content else content
    if isinstance(name, Traced) and name.spans and name.spans[0][2] in origins:  # fast path
        return True
    if isinstance(content, str):
        content = content.strip()
    elif message["role"] != "assistant":  # content in parts
        content = [part for part in content or () if part.get("text", "").strip()]
    return not content or not origins.isdisjoint({UNKNOWN, *sources(content)})


def _default_tools(compiled: Any, variables: Mapping[str, Any]) -> tuple[ToolSpec, ...]:
    """Return no tools, or the probe tool if the template renders a question only with tools."""
    question = template_messages([user_message("Why?")])
    choices: tuple[tuple[ToolSpec, ...], ...] = ((), (LOOK,))
    for tools in choices:
        try:
            _run(compiled, variables, template_tools(tools), False, question)
        except Exception:  # as above
            continue
        return tools
    return ()


def _run(
    compiled: Any,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    generation_prompt: bool,
    messages: Sequence[TemplateMessage],
) -> Traced:
    return render(compiled, inputs(variables, tools, generation_prompt, messages))


def inputs(
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    generation_prompt: bool,
    messages: Sequence[TemplateMessage],
) -> dict[str, Any]:
    """Return the variables of one rendering."""
    values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
    return {**variables, **values}


def _roles(messages: Sequence[TemplateMessage]) -> list[str]:
    return [message["role"] for message in messages]


Render = Callable[[Sequence[TemplateMessage]], Traced]
"""Renders template messages; raises any exception of the template."""
_USER, _ASSISTANT, _REASONING = 0, 1, 2


def find_message_format(render: Render) -> MessageFormat:
    """Find the message format of a template by trying; options that make no difference keep their default."""
    strings, parts = MessageFormat(), MessageFormat(parts=True)
    shows_parts_only = not _shows(render, [_user_message(strings)]) and _shows(render, [_user_message(parts)])
    message_format = parts if shows_parts_only else strings
    if not _accepts_calls(render, message_format):
        short_ids = replace(message_format, short_ids=True)
        message_format = short_ids if _accepts_calls(render, short_ids) else message_format
    if not _reads_mapping(render, message_format) and _reads_string(render, message_format):
        message_format = replace(message_format, arguments="string")
    question, call = _call_messages(message_format)
    one_call = not _renders(render, [question, call | {"tool_calls": call["tool_calls"] * 2}])
    message_format = replace(message_format, one_call=one_call and _renders(render, [question, call]))
    for key in REASONING_KEYS:
        reasoning = {key: Traced.content("hm", _REASONING)}
        answer = {"role": "assistant", "content": message_format.content(Traced.content("so", _ASSISTANT))}
        if any(_shows(render, [question, turn | reasoning], _REASONING) for turn in (answer, call)):
            with_text = call | {"content": answer["content"]}
            takes_each = _renders(render, [question, with_text]) and _renders(render, [question, call | reasoning])
            takes_both = not takes_each or _renders(render, [question, with_text | reasoning])
            return replace(message_format, reasoning=key, text_and_reasoning=takes_both)
    return replace(message_format, reasoning=None)


def _accepts_calls(render: Render, message_format: MessageFormat) -> bool:
    """Return whether the template renders a call and its result, with arguments as a mapping or as a string."""
    for each in (message_format, replace(message_format, arguments="string")):
        question, call = _call_messages(each)
        content = each.content(Traced.content("seen", _ASSISTANT))
        result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "name": "look", "content": content}
        if _renders(render, [question, call, result]):
            return True
    return False


def _user_message(message_format: MessageFormat) -> TemplateMessage:
    return {"role": "user", "content": message_format.content(Traced.content("why", _USER))}


def _call_messages(message_format: MessageFormat, arguments: Any = None) -> list[TemplateMessage]:
    if arguments is None:
        arguments = '{"at": "it"}' if message_format.arguments == "string" else {"at": "it"}
    function = {"name": Traced.content("look", _ASSISTANT), "arguments": arguments}
    calls = [
        {"id": Traced.content(message_format.call_id("call_1"), _ASSISTANT), "type": "function", "function": function}
    ]
    empty = {
        "role": "assistant",
        "content": message_format.content(Traced.content("", _ASSISTANT)),
        "tool_calls": calls,
    }
    return [_user_message(message_format), empty]


def _reads_mapping(render: Render, message_format: MessageFormat) -> bool:
    """Return whether the template renders a mapping of arguments as anything but its Python `repr`."""
    content = Traced.content
    text = _try(
        render,
        _call_messages(
            message_format, {content("at", _ASSISTANT): content("it's", _ASSISTANT), content("n", _ASSISTANT): True}
        ),
    )
    return text is not None and "'at'" not in text and "\"it's\", 'n" not in text


def _reads_string(render: Render, message_format: MessageFormat) -> bool:
    text = _try(render, _call_messages(message_format, Traced.content('{"at": "it"}', _ASSISTANT)))
    return text is not None and '{"at": "it"}' in text


def _shows(render: Render, messages: Sequence[TemplateMessage], source: int = _USER) -> bool:
    text = _try(render, messages)
    return text is not None and any(origin == source for _, _, origin in text.spans)


def _renders(render: Render, messages: Sequence[TemplateMessage]) -> bool:
    return _try(render, messages) is not None


def _try(render: Render, messages: Sequence[TemplateMessage]) -> Traced | None:
    try:
        return render(messages)
    except Exception:  # a template may raise any exception
        return None


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


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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


_HARMLESS = frozenset({str, Traced, Namespace, LoopContext})


class TracingEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with content traced through string operations."""

    code_generator_class = _Generator
    concat = staticmethod(concat)
    text = staticmethod(as_text)
    intercepted_binops = frozenset({"%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute; of a message, its items come first unless `dict` has an attribute of that name."""
        kind = type(obj)
        if kind is Traced and attribute not in _TEXT_ATTRIBUTES:
            return self.undefined(obj=obj, name=attribute)  # templates test `content.content is defined` on plain text
        if kind is dict and attribute not in _MAPPING_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind in _HARMLESS and not attribute.startswith(("_", "format")):
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
            if kwargs:
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


_PICKING = {"attr", "batch", "d", "default", "dictsort", "first", "groupby", "items", "last", "list", "map"}
_CHOOSING = {"max", "min", "random", "reject", "rejectattr", "select", "selectattr", "slice", "sort", "unique"}
SELECTING = _PICKING | _CHOOSING
"""Filters that return items of their input unchanged and make no strings."""


def traced_filters() -> dict[str, Callable[..., Any]]:
    """Return all filters by name: Jinja's, and transformers' `tojson`.

    Those that templates use on content are traced precisely; results of other filters are all content.
    """
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


_PERCENT = re.compile(r"%(?:\((?P<key>[^()]*)\))?(?P<kind>.)", re.DOTALL)


def percent(layout: str, values: Any) -> str:
    """Return `layout % values` with its spans: the layout's characters keep theirs, and so does each inserted value."""
    plain = str.__mod__(str.__str__(layout), values)
    return _traced_or_marked(plain, _percent(layout, values), layout, values)


def braces(layout: str, plain: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return `plain`, the sandbox's `layout.format(*args, **kwargs)`, with its spans."""
    return _traced_or_marked(plain, _braces(layout, args, kwargs), layout, args, kwargs)


def _traced_or_marked(plain: str, traced: str | None, *origins: object) -> str:
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
