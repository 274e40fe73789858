"""Which format a chat template shows: by marks that no other family writes, and never by a guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DetectionError(ValueError):
    """A chat template shows no known format of calls, or more than one."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A format that a template shows.

    Attributes:
        name: The parser's name.
        why: What shows it, as a sentence.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class _Marks:
    """A format is shown where a template has all of `has` and nothing of `lacks`."""

    name: str
    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    def shown(self, template: str) -> bool:
        return all(mark in template for mark in self.has) and not any(mark in template for mark in self.lacks)


_TABLE = (
    _Marks("hermes", ("<tool_call>", '{"name": ', '"arguments": '), ("<function=", "<arg_key>", "<|tool_call>")),
    _Marks("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    _Marks("glm45", ("<tool_call>{function-name}\n<arg_key>",)),
    _Marks("glm47", ("<tool_call>{function-name}<arg_key>",)),
    _Marks("kimi_k2", ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>")),
    _Marks("deepseek_v3", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json")),
    _Marks("deepseek_v31", ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"), ("```json",)),
    _Marks("deepseek_v32", ("｜DSML｜", "function_calls>")),
    _Marks("deepseek_v4", ("｜DSML｜", "tool_calls>"), ("function_calls>",)),
    _Marks("gpt_oss", ("<|channel|>commentary", "<|call|>")),
    _Marks("llama3_json", ('{"name": function name, "parameters": dictionary',), ("<|python_start|>",)),
    _Marks("llama4_pythonic", ("<|python_start|>", "<|header_start|>")),
    _Marks("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    _Marks("gemma4", ("<|tool_call>call:", '<|"|>')),
    _Marks("mistral", ("[TOOL_CALLS]",)),
)


def detect_tool_parser(template: str) -> Detected:
    """Find the format that a chat template shows.

    Args:
        template: Its source.

    Raises:
        DetectionError: It shows none that is known, or several, which are named.
    """
    shown = [marks for marks in _TABLE if marks.shown(template)]
    if not shown:
        known = ", ".join(marks.name for marks in _TABLE)
        raise DetectionError(
            f"The chat template shows no format of tool calls that is known by its marks ({known}): name the parser, "
            "as in parser='hermes'; for a policy that calls no tools any will do."
        )
    if len(shown) > 1:
        names = " and ".join(repr(marks.name) for marks in shown)
        raise DetectionError(
            f"The chat template shows {names}, and a guess could be wrong: name the parser, as in "
            f"parser={shown[0].name!r}."
        )
    [only] = shown
    has = " and ".join(repr(mark) for mark in only.has)
    return Detected(only.name, f"The chat template has {has}, which only {only.name} writes.")


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """Give the source of the chat template with tools; of several, "tool_use" or else "default".

    Raises:
        DetectionError: The tokenizer has none.
    """
    template: object = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if not isinstance(template, str):
        raise DetectionError(
            "The tokenizer has no chat template, which would show the format: name the parser, as in parser='hermes'."
        )
    return template
