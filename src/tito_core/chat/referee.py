"""The referee of deltas (law 7): transformers' own plain rendering of whole conversations.

It converts Strands messages with its own code and imports nothing that makes deltas (enforced by import-linter), so
that the two share no mistakes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from typing import Any

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""transformers 5.23 copies reasoning under these names too (`chat_template_utils._alias_reasoning_fields`)."""
_OWN_ID = re.compile(r"call_[0-9a-f]{8}_\d+\.(?P<sampled>.+)", re.DOTALL)
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_TOOL = {
    "name": "zqtool",
    "description": "Zq.",
    "inputSchema": {"json": {"type": "object", "properties": {"zqkey": {"type": "string"}}, "required": []}},
}


class RefusedError(ValueError):
    """The template raises on these messages."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """How Strands messages are converted for a template.

    Attributes:
        parts: Content is a list of `{"type": "text"}` parts, not a string.
        json_arguments: A call's arguments are JSON text, not a mapping.
        short_ids: Call ids have nine letters or digits, as Mistral's templates require.
        text_or_reasoning: A message with calls has text or reasoning, not both, as gpt-oss requires.
    """

    parts: bool = False
    json_arguments: bool = False
    short_ids: bool = False
    text_or_reasoning: bool = False

    def messages(self, messages: Sequence[Any], system: str | None) -> list[dict[str, Any]]:
        """Convert a history."""
        converted = [{"role": "system", "content": self._content(system)}] if system else []
        calls: list[Any] = []
        for message in messages:
            texts = [block["text"] for block in message["content"] if "text" in block]
            images = any("image" in block for block in message["content"])
            if message["role"] == "assistant":
                calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
                converted.append(self._answer(message, texts, calls))
                continue
            results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
            names = {call["toolUseId"]: call["name"] for call in calls}
            order = {call_id: position for position, call_id in enumerate(names)}
            for result in sorted(results, key=lambda each: order.get(each["toolUseId"], len(order))):
                call_id = result["toolUseId"]
                converted.append(
                    {
                        "role": "tool",
                        "tool_call_id": self._id(call_id),
                        "name": names.get(call_id, ""),
                        "content": self._mixed(result["content"]),
                    }
                )
            if texts or images or not results:
                converted.append({"role": "user", "content": self._mixed(message["content"])})
        return converted

    def _mixed(self, blocks: Sequence[Any]) -> Any:
        """Return the texts and images of a message or tool result; a list of parts if there is an image."""
        runs: list[list[str] | None] = [[]]  # None is an image
        for block in blocks:
            if "image" in block:
                runs += [None, []]
            elif "text" in block or "json" in block:
                run = runs[-1]
                assert run is not None
                run.append(block["text"] if "text" in block else _json(block["json"]))
        if len(runs) == 1:
            return self._content("\n".join(runs[0] or []))
        shown = [run for run in runs if run is None or run]
        return [{"type": "image"} if run is None else {"type": "text", "text": "\n".join(run)} for run in shown]

    def _answer(self, message: Any, texts: list[str], calls: list[Any]) -> dict[str, Any]:
        blocks = [block["reasoningContent"] for block in message["content"] if "reasoningContent" in block]
        reasoning = [block["reasoningText"]["text"] for block in blocks if "reasoningText" in block]
        answer: dict[str, Any] = {"role": "assistant", "content": self._content("\n".join(texts))}
        if reasoning and not (self.text_or_reasoning and calls and any(texts)):
            answer |= dict.fromkeys(_REASONING_KEYS, "\n".join(reasoning))
        if calls:
            answer["tool_calls"] = [
                {
                    "id": self._id(call["toolUseId"]),
                    "type": "function",
                    "function": {
                        "name": call["name"],
                        "arguments": _json(call["input"]) if self.json_arguments else call["input"],
                    },
                }
                for call in calls
            ]
        return answer

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self.parts else text

    def _id(self, call_id: str) -> str:
        own = _OWN_ID.fullmatch(call_id)
        shown = own["sampled"] if own else call_id
        if self.short_ids and not _SHORT_ID.fullmatch(shown):
            return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        return shown


class Referee:
    """Renders conversations as transformers does, from plain strings.

    Args:
        source: The chat template.
        variables: The tokenizer's special tokens and the template arguments.
        now: Returns the time for `strftime_now`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: Callable[[], datetime] = datetime.now) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds to import

        self.bos = str(variables.get("bos_token", ""))
        self._compiled = _compile_jinja_template(source)
        self._variables = {**variables, "strftime_now": lambda layout: now().strftime(layout)}

    def render(
        self,
        messages: Sequence[Any],
        system: str | None,
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """Return the plain rendering of Strands messages.

        Raises:
            RefusedError: The template raises.
        """
        return self._rendered(self.conversion, messages, system, tools, generation_prompt)

    @cached_property
    def conversion(self) -> Conversion:
        """The conversion under which the template shows most of a small conversation; on a tie, the default one."""
        question = {"role": "user", "content": [{"text": "zqask"}]}
        use = {"toolUse": {"toolUseId": "call_zq", "name": "zqtool", "input": {"zqkey": "zqvalue"}}}
        thought = {"reasoningContent": {"reasoningText": {"text": "zqthought"}}}
        result = {"toolUseId": "call_zq", "status": "success", "content": [{"text": "zqseen"}]}
        rounds: list[list[Any]] = [
            [question, {"role": "assistant", "content": [{"text": "zqsay"}]}, question],
            [question, {"role": "assistant", "content": [use]}],
            [question, {"role": "assistant", "content": [use]}, {"role": "user", "content": [{"toolResult": result}]}],
            [question, {"role": "assistant", "content": [thought, {"text": "zqbeside"}, use]}],
        ]
        options = [Conversion(*flags) for flags in product((False, True), repeat=4)]
        return max(options, key=lambda option: sum(self._count_shown(option, messages) for messages in rounds))

    def _count_shown(self, conversion: Conversion, messages: Sequence[Any]) -> int:
        """Count the words of a conversation that its rendering shows, except as Python or JSON literals."""
        words = set(re.findall(r"zq[a-z]+", json.dumps(messages))) - {"zqvalue"}
        counts = [0]
        for tools in (None, [_TOOL]):
            try:
                text = self._rendered(conversion, messages, None, tools, False)
            except RefusedError:
                continue
            plain = re.sub(r"""(?:'|\\")zq[a-z]+""", "", text)
            start = plain.find("zqask")
            counts.append(1 + sum(word in plain[max(start, 0) :] for word in words))
        return max(counts)

    def _rendered(
        self,
        conversion: Conversion,
        messages: Sequence[Any],
        system: str | None,
        tools: Sequence[Any] | None,
        generation_prompt: bool,
    ) -> str:
        functions = [{"type": "function", "function": _function(tool)} for tool in tools or ()]
        try:
            return str(
                self._compiled.render(
                    messages=conversion.messages(messages, system),
                    tools=functions or None,
                    documents=None,
                    add_generation_prompt=generation_prompt,
                    **self._variables,
                )
            )
        except Exception as error:  # a template may raise any exception
            raise RefusedError(f"{type(error).__name__}: {error}") from error


def _function(tool: Any) -> dict[str, Any]:
    schema = tool["inputSchema"]
    parameters = schema.get("json", schema)
    return {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
