"""The evidence that a chat template's deltas equal its own rendering (law 7), as a value that is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

ContentTokens = Literal["inert", "as-template"]


class Thinking(StrEnum):
    """What a template does with the reasoning of earlier answers."""

    KEPT = "kept"
    STRIPPED = "stripped at the next question"
    ALWAYS_STRIPPED = "shown in the last answer only"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was tried on a template, and what was found.

    Attributes:
        template: sha256 of the template's source, hex.
        tokenizer: sha256 of the tokenizer's definition, hex.
        arguments: The template arguments as text.
        candidate: Name of the chosen way to find a delta.
        passed: Names of the probes on which the delta equals the template's own rendering.
        refused: Probes that the template itself refuses, with its reason.
        rewrites: Where the template writes its own past in another way than it was sampled or prompted.
        thinking: What it does with the reasoning of earlier answers.
        tools: Whether results of tools were among the probes that passed.
        needs_tools: Whether the template works only where tools are given.
        content_tokens: Whether content may become control tokens ("as-template") or not.
    """

    template: str
    tokenizer: str
    arguments: str
    candidate: str
    passed: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    rewrites: tuple[str, ...]
    thinking: Thinking
    tools: bool
    content_tokens: ContentTokens = "inert"
    needs_tools: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the certificate as `tito template check` prints it."""
        yield f"template   sha256 {self.template}"
        yield f"tokenizer  sha256 {self.tokenizer}"
        yield f"delta      rendered {self.candidate}"
        yield f"probes     {len(self.passed)} equal to the template's own rendering, 0 different"
        only = ", and it works only with tools" if self.needs_tools else ""
        yield f"tools      {f'yes{only}' if self.tools else 'no: the template shows none'}"
        for probe, reason in self.refused:
            yield f"refuses    {probe}: {reason}"
        for rewrite in self.rewrites:
            yield f"rewrites   {rewrite}"
        yield f"reasoning  {self.thinking}"
        yield f"thinking   'keep' {_KEEP[self.thinking]}; 'as-template' {_AS_TEMPLATE[self.thinking]}"
        inert = "no control token comes from content" if self.content_tokens == "inert" else "content may write tokens"
        yield f"content    {self.content_tokens}: {inert}"

    def to_json(self) -> str:
        """Give the certificate as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """Read what `to_json` gave.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["passed"] = tuple(fields["passed"])
            fields["refused"] = tuple((probe, reason) for probe, reason in fields["refused"])
            fields["rewrites"] = tuple(fields["rewrites"])
            fields["thinking"] = Thinking(fields["thinking"])
            return cls(**fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"This is no certificate of a chat template ({error!r}).") from error


_KEEP = {
    Thinking.KEPT: "keeps it, as the template does",
    Thinking.STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.ALWAYS_STRIPPED: "keeps what was sampled, where the template would strip it",
    Thinking.NOT_SHOWN: "keeps what was sampled",
}
_AS_TEMPLATE = {
    Thinking.KEPT: "does the same",
    Thinking.STRIPPED: "branches at each question after an answer with reasoning",
    Thinking.ALWAYS_STRIPPED: "branches after each answer with reasoning",
    Thinking.NOT_SHOWN: "branches after each answer with reasoning",
}
