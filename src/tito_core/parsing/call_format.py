"""What each tool-call format implements, and what several formats share: sections of calls, named parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from tito_core.parsing.call_values import ParsedCallText, shortened
from tito_core.parsing.completion import Completion, Cursor, Tools
from tito_core.parsing.grammar import CHOOSE_AUTO, NoCallGrammarError, TagFormat
from tito_core.parsing.markup import Markup


class CallFormat:
    """How one model family writes tool calls. Instances are stateless and shared by all rollouts.

    To add a format:

    1. In this package, create a module in `tito_core/parsing/formats/`; every module there is imported. If the format
       is an existing one with other tags, add a `register_format` line to that format's module instead. In a package
       of yours use any module, leave out step 6, and for step 5 also see the docstring of `tito_core.parsing.registry`,
       which has the entry point.
    2. Subclass `CallFormat`. List all tags in `tags`, those that begin a call in `opening`, and closers in `pairs`.
    3. Implement `read` for calls between tags, `read_bare` for calls without tags, or both. In `read`, find the end of
       the call with `Completion.frame`, and pass it to `Completion.read_frame` with a function that parses the body.
       That function takes a `Cursor` and returns a `ParsedCallText` or raises `Malformed`. Never repair a call (law 9).
       If calls have no closing tag, parse from the start to find the end, and add each call with `Completion.add`, as
       `_read` in `formats/pythonic.py` does. Report damage with `Completion.add_malformed`. If the damage may have
       swallowed what follows, use `add_unclosed`; no later call then runs.
    4. Implement `grammar` if engines can force a call in this notation; `tito_core/parsing/grammar.py` has the parts.
       Else its `Family` (step 6) has `forced=False`, and `docs/tools.md` names it under "Forced calls".
    5. Call `register_format` with the parser's name, the family's reasoning tags, and the marks by which parser="auto"
       recognises its chat template.
    6. Add a `Family` that renders calls to `tests/parsing/families.py`; the tests of all formats then run on it. If the
       tag that begins a call is not a control token, set its `bare_prefix`. Where they apply, add edge cases to
       `edges.py`, a template with the marks to `test_detection.py`, and an engine's name of it to `engine_names.py`.
       Then run `python -m parsing.record NAME` in `tests/`, and add a row to the table in `docs/tools.md`.

    A whole format, for `<call name=look>{"at": "x"}</call>` (`docs/tools.md` has it with its imports):

        OPEN, CLOSE = "<call name=", "</call>"


        class NamedCalls(CallFormat):
            tags = (OPEN, CLOSE)
            opening = frozenset({OPEN})
            pairs = {OPEN: CLOSE}

            def read(self, completion, start, tag):
                body = search = start + len(OPEN)
                if completion.markup.token_of(CLOSE) is None:  # then a JSON string may spell it: search after the value
                    value = completion.text.find(">", body) + 1
                    search = max(body, json_end(completion.text, value))
                frame = completion.frame(start, body, CLOSE, before=self.opening, search=search)
                return completion.read_frame(frame, CLOSE, _call)


        def _call(cursor):
            name = cursor.tool_name(cursor.until_text(">"))
            return call_of_arguments(name, cursor.take_rest())


        register_format("named", NamedCalls(), marks=Marks((OPEN,)))

    Other examples: `formats/json_object.py` (one JSON object, with a grammar), `formats/minimax.py` (tagged parameters
    in a section of calls), `formats/pythonic.py` (calls without tags).

    Attributes:
        tags: All tags, closing and inner ones included. A tag that is a token of the vocabulary is matched by its id
            only, so text that spells it remains text. Of tags that begin at one place the longest counts.
        anchors: Control tokens that are part of longer tags, such as `｜DSML｜`; see `Markup`.
        bare: The characters with which a call without tags can begin; empty if every call has a tag.
        opening: The tags that begin a call, or a section of calls.
        pairs: The tag that closes what a tag opens, for the tags with such a closer. After a cut, what is still open is
            closed with them, see `Completion.unclosed`.
        wrappers: Tags around the answer's text; they are removed from it.
    """

    tags: Sequence[str] = ()
    anchors: Sequence[str] = ()
    bare: str = ""
    opening: Set[str] = frozenset()
    pairs: Mapping[str, str] = {}
    wrappers: Sequence[str] = ()

    def read(self, completion: Completion, start: int, tag: str) -> int | None:
        """Read the call, or the section of calls, that an opening tag begins, and add it to `completion.calls`.

        Args:
            completion: The completion, outside reasoning.
            start: The first character of the tag.
            tag: The tag, one of `opening`.

        Returns:
            The character after the call; None if the tag does not begin a call and is text.
        """
        raise AssertionError(f"{type(self).__name__} lists {tag} in `opening`: implement `read`, which parses it.")

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read calls without tags at the first character that is neither reasoning nor blank.

        Returns:
            The character after the calls; None if the text is not a call, as by default.
        """
        return None

    def grammar(self, markup: Markup, tools: Tools) -> TagFormat:
        """Return the structural tag that forces one call of any of `tools`.

        Raises:
            NoCallGrammarError: Engines have no grammar for this format.
        """
        raise NoCallGrammarError(
            "A tool call cannot be forced in this format: engines have no grammar for its notation of arguments. "
            f"{CHOOSE_AUTO}"
        )


@dataclass(frozen=True, slots=True)
class Section:
    """A section: several calls between an outer pair of tags, each in its own tags (DeepSeek, Kimi, MiniMax).

    Attributes:
        open: Opens the section.
        close: Closes the section.
        call: Opens a call in it.
        end_call: Closes a call.
        inner: Tags inside a call; one after a call shows that the call was closed before its arguments.
    """

    open: str
    close: str
    call: str
    end_call: str
    inner: Set[str] = frozenset()

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The four tags."""
        return self.open, self.close, self.call, self.end_call

    @property
    def pairs(self) -> dict[str, str]:
        """What closes the section, and a call."""
        return {self.open: self.close, self.call: self.end_call}

    def read(self, completion: Completion, start: int, body: Callable[[Cursor], ParsedCallText]) -> int:
        """Read the section at character `start`; `body` parses each call. Return the character after the section."""
        first, at = len(completion.calls), start + len(self.open)
        inside = {self.open, self.close, self.call}
        while True:
            mark = completion.next_mark(at, inside)
            stop = len(completion.text) if mark is None else mark.start
            if mark is not None and mark.tag == self.close:
                self._stray(completion, at, stop)
                if len(completion.calls) == first:
                    completion.add_malformed(start, mark.stop, "The section has no calls.")
                return mark.stop
            if mark is None or mark.tag == self.open:
                self._unclosed(completion, first, start, at, stop)
                return stop
            self._stray(completion, at, stop)
            frame = completion.frame(mark.start, mark.stop, self.end_call, frozenset(inside))
            following = completion.next_mark(frame.stop)
            if frame.closed and following is not None and following.tag in self.inner:
                reason = f"The call has {following.tag} after its closing {self.end_call}."
                completion.add_malformed(frame.start, frame.stop, reason)
                at = frame.stop
            else:
                at = completion.read_frame(frame, self.end_call, body)

    def _stray(self, completion: Completion, start: int, stop: int) -> None:
        text = completion.text[start:stop]
        if text.strip():
            completion.add_malformed(start, stop, f"There is stray text among the calls: {shortened(text)}.")

    def _unclosed(self, completion: Completion, first: int, start: int, at: int, stop: int) -> None:
        """Add the end of a section that was not closed.

        If the completion ends after whole calls, they are loose, or sound where the token limit cut the section off.
        """
        reason = f"The section of calls has no closing {self.close} tag."
        if completion.truncated and stop == len(completion.text):
            if completion.text[at:stop].strip() or len(completion.calls) == first:
                completion.add_unclosed(at if len(completion.calls) > first else start, stop, reason)
            return
        if len(completion.calls) == first:
            completion.add_malformed(start, stop, reason)
            return
        self._stray(completion, at, stop)
        if stop == len(completion.text) and all(call.status.runs for call in completion.calls[first:]):
            completion.mark_loose(first, reason)
            return
        for i in range(first, len(completion.calls)):
            completion.mark_malformed(i, reason)


def parameters(cursor: Cursor, tag: str, end: str, in_python: bool = False) -> dict[str, Any]:
    """Take the parameters of a call, each between the tags `tag` and `end`; their names are in double quotes.

    `in_python`: see `Cursor.reading`.
    """
    arguments: dict[str, Any] = {}
    while cursor.peek() == tag:
        cursor.tag(tag)
        key = quoted(cursor)
        if key in arguments:
            raise cursor.error(f"The parameter {key!r} appears twice.")
        arguments[key] = cursor.reading(cursor.until_tag(end), in_python)
    return arguments


def quoted(cursor: Cursor, before: str = "") -> str:
    """Take a name in double quotes, with the text `before` it and the `>` after it; return the name."""
    if not cursor.follows(f'{before}"'):
        raise cursor.error(f"The name must be in double quotes: {cursor.until_text('>')[:60]!r}.")
    written = cursor.until_text('">')
    name = written.removeprefix(f'{before}"')
    if written != f'{before}"{name}' or not name or name != name.strip() or set(name) & set("<\"'\n"):
        as_written = f'{written}"'
        raise cursor.error(f"The name must be in double quotes: {as_written[:60]!r}.")
    return name
