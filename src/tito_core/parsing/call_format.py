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
       with other tags, add a `register_format` line to that format's module instead. A package of yours calls
       `register_format` itself, and the user imports it before choosing the parser.
    2. Subclass `CallFormat`. List every tag in `tags`, and in `opening` those that begin a call.
    3. Implement `read` (calls between tags) or `read_bare` (calls without tags), or both. `formats/hermes.py` is the
       shortest example with one JSON object per call, `formats/minimax_m2.py` with tagged parameters, and
       `formats/sections.py` reads calls that share an outer pair of tags. `read` usually asks `Completion.frame` where
       the call ends and gives it to `Completion.read_frame` with a function that takes a `Cursor` over the body and
       returns a `ParsedCallText`, or raises `Malformed`. Never repair a call (law 9).
    4. Implement `grammar` if engines can force a call in this notation.
    5. Call `register_format(name, instance, ...)` with the family's reasoning tags, and the marks by which
       `parser="auto"` recognises its chat template.
    6. Describe the format in `tests/parsing/families.py`, where a `Family` renders calls: the tests of all formats then
       run on it. Run `python -m parsing.record` in `tests/`, and add a row to the table in `docs/tools.md`.

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
