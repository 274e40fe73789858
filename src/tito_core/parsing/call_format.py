"""The interface that each tool-call format implements."""

from __future__ import annotations

from collections.abc import Sequence, Set

from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.grammar import CHOOSE_AUTO, Grammar, NoCallGrammarError
from tito_core.parsing.markup import Markup


class CallFormat:
    """How one model family writes tool calls. Instances are stateless and shared by all rollouts.

    To add a format:

    1. Create a module in `tito_core/parsing/formats/`; every module there is imported. If the format is an existing one
       with other tags, add a `register_format` line to that format's module instead. For a format in another
       distribution, see `tito_core/parsing/registry.py`.
    2. Subclass `CallFormat`. List all tags in `tags`, and in `opening` those that begin a call.
    3. Implement `read` for calls between tags, `read_bare` for calls without tags, or both. In `read`, find the end of
       the call with `Completion.frame`, and pass it to `Completion.read_frame` with a function that parses the body.
       That function takes a `Cursor` and returns a `ParsedCallText` or raises `Malformed`. Never repair a call (law 9).
       If calls have no closing tag, parse from the start to find the end, and add each call with `Completion.add`, as
       `_read` in `formats/pythonic.py` does. Report damage with `Completion.add_malformed`. If the damage may have
       swallowed what follows, use `add_unclosed`; no later call then runs.
    4. Implement `grammar` if engines can force a call in this notation; `tito_core/parsing/grammar.py` has the parts.
    5. Call `register_format` with the parser's name, the family's reasoning tags, and the marks by which parser="auto"
       recognises its chat template.
    6. Add a `Family` that renders calls to `tests/parsing/families.py`; the tests of all formats then run on it. If the
       tag that begins a call is not a control token, set its `bare_prefix`. Run `python -m parsing.record` in `tests/`,
       and add a row to the table in `docs/tools.md`. If an engine has a parser, name it in `engine_names.py`, by which
       the comparison with the engines finds it.
    7. Where they apply, add edge cases to `edges.py`, and a template with the marks to `test_detection.py`.

    A whole format, for `<call name=look>{"at": "x"}</call>` (`docs/tools.md` has it with its imports):

        OPEN, CLOSE = "<call name=", "</call>"


        class NamedCalls(CallFormat):
            tags = (OPEN, CLOSE)
            opening = frozenset({OPEN})

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

    Other examples: `formats/hermes.py` (one JSON object, with a grammar), `formats/minimax_m2.py` (tagged parameters in
    a section of calls), `formats/pythonic.py` (calls without tags).

    Attributes:
        tags: All tags, closing and inner ones included. A tag that is a token of the vocabulary is matched by its id
            only, so text that spells it remains text.
        anchors: Control tokens that are part of longer tags, such as `｜DSML｜`; see `Markup`.
        bare: The characters with which a call without tags can begin; empty if every call has a tag.
        opening: The tags that begin a call, or a section of calls.
        wrappers: Tags around the answer's text; they are removed from it.
    """

    tags: Sequence[str] = ()
    anchors: Sequence[str] = ()
    bare: str = ""
    opening: Set[str] = frozenset()
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
        raise AssertionError(f"{type(self).__name__} does not read {tag}.")

    def read_bare(self, completion: Completion, start: int) -> int | None:
        """Read calls without tags at the first character that is neither reasoning nor blank.

        Returns:
            The character after the calls; None if the text is not a call, as by default.
        """
        return None

    def grammar(self, markup: Markup, tools: Tools) -> Grammar:
        """Return the structural tag that forces one call of any of `tools`.

        Raises:
            NoCallGrammarError: Engines have no grammar for this format.
        """
        raise NoCallGrammarError(
            "A tool call cannot be forced in this format: engines have no grammar for its notation of arguments. "
            f"{CHOOSE_AUTO}"
        )
