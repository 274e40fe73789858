"""How a family writes tool calls: what each format overrides."""

from __future__ import annotations

from collections.abc import Sequence, Set

from tito_core.parsing.completion import Completion, Tools
from tito_core.parsing.grammar import Grammar, NoCallGrammarError
from tito_core.parsing.markup import Markup


class CallFormat:
    """A format of calls. Stateless.

    Attributes:
        tags: All its markup.
        anchors: Control tokens that its tags hold; see `Markup`.
        bare: The characters that a call without any tag begins with; none where every call has a tag.
        opening: The tags that begin a call or a section of calls outside reasoning.
        wrappers: Tags around text that are no part of it.
    """

    tags: Sequence[str] = ()
    anchors: Sequence[str] = ()
    bare: str = ""
    opening: Set[str] = frozenset()
    wrappers: Sequence[str] = ()

    def read(self, said: Completion, opened: int, tag: str) -> int | None:
        """Read what the opening tag at character `opened` begins into `said.calls`.

        Returns:
            The character after it; None where the tag begins no call after all, and is text.
        """
        raise AssertionError(f"{tag} opens no call.")

    def read_bare(self, said: Completion, start: int) -> int | None:
        """Read calls that begin without any tag, at the first character that is neither reasoning nor blank.

        Returns:
            The character after them; None where the text is no call, as always in formats whose calls have tags.
        """
        return None

    def grammar(self, markup: Markup, tools: Tools) -> Grammar:
        """Return the structural tag that forces one call of any of `tools`.

        Raises:
            NoCallGrammarError: The format has none.
        """
        raise NoCallGrammarError(
            "A tool call cannot be forced in this format: engines have no grammar for its notation of arguments. "
            "Leave the choice to the policy, or set sampling.grammar."
        )
