"""The tags of reasoning in each model family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Reasoning between two tags.

    Attributes:
        open: Tag that opens a block; the generation prompt may contain it.
        close: Tag that closes it.
        label: Text at the start of a block that is not reasoning (the name of Gemma's channel).
    """

    open: str
    close: str
    label: str = ""

    def text_of(self, block: str) -> str:
        """Return a block's text without its label and the newlines around it."""
        return block.removeprefix(self.label).strip("\n")


THINK = ReasoningTags("<think>", "</think>")
"""Qwen, GLM, DeepSeek, Kimi, MiniMax, Nemotron."""

BRACKET_THINK = ReasoningTags("[THINK]", "[/THINK]")
"""Mistral, since tokenizer version 13 (vLLM 0.32, `parser/mistral.py`)."""

THOUGHT_CHANNEL = ReasoningTags("<|channel>", "<channel|>", "thought\n")
"""Gemma 4 (its chat template of 2026-07-09)."""

LONGCAT_THINK = ReasoningTags("<longcat_think>", "</longcat_think>")
"""LongCat."""

REASONING = {"think": THINK, "bracket_think": BRACKET_THINK, "channel": THOUGHT_CHANNEL, "none": None}
"""The values of the option `reasoning`."""
