"""Random rollouts over a template, each delta held against transformers' own rendering of the whole conversation.

Independent of the code under test: the expected delta is cut out of the whole rendering after a word that only the
turn in question holds, and encoded by the tokenizer itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from strands.types.content import ContentBlock, Message, Messages
from transformers.utils.chat_template_utils import render_jinja_template

from support.conversations import LOOK, translated
from tito_core.chat.ending import Opened
from tito_core.chat.messages import template_messages, template_tools
from tito_core.chat.template import ChatTemplate
from tito_core.ledger.provenance import Provenance

TRUNCATED = 0.3
_WORDS = (
    "the",
    "door",
    "naïve",
    "日本",
    "Ω",
    "42",
    "3.14",
    "a_b",
    "it's",
    '"so"',
    "x=1;",
    "😀",
    "né",
    "\\n",
    "{}",
    "–",
)
_SPACES = (" ", " ", " ", "\n", "  ", "\n\n", "\t", ", ", ". ")


@dataclass(frozen=True)
class Turn:
    """An assistant message, what follows it, and whether it was cut off.

    Attributes:
        mark: The word by which the end of what was sampled is found.
        opened: What a turn that was cut off left open; None for one that ended by itself.
    """

    before: Messages
    answered: Message
    new: Messages
    mark: str
    opened: Opened | None


@dataclass(frozen=True)
class Rollout:
    system: str | None
    tools: Any
    turns: list[Turn]


@dataclass(frozen=True)
class Features:
    """What a template shows without moving it, by its certificate."""

    tools: bool
    system: bool
    parallel: bool
    remarks: bool
    reasoning: bool

    @classmethod
    def of(cls, template: ChatTemplate) -> Features:
        certificate = template.certificate
        refused = [probe for probe, _ in certificate.refused]
        one_call = any(probe.startswith("two results") for probe in refused)
        only_first = any("only the first" in line for line in certificate.rewrites)
        return cls(
            tools=certificate.tools,
            system=not any(probe == "question, first, with a system prompt" for probe in refused),
            parallel=certificate.tools and not one_call and not only_first,
            remarks=not any(line.startswith("text besides calls") for line in certificate.rewrites),
            reasoning=template.rendering.message_format.reasoning is not None,
        )


def text(random: Random, words: int = 6) -> str:
    pieces = [random.choice(_WORDS) + random.choice(_SPACES) for _ in range(random.randint(0, words))]
    return "".join(pieces)


@dataclass
class _Writer:
    random: Random
    features: Features
    messages: Messages = field(default_factory=list)
    count: int = 0

    def mark(self) -> str:
        self.count += 1
        return f"Zq{self.count}z"

    def opened(self, *kinds: Opened) -> Opened | None:
        return self.random.choice(kinds) if self.random.random() < TRUNCATED else None

    def thought(self) -> list[ContentBlock]:
        if not self.features.reasoning or self.random.random() < 0.5:
            return []
        return [{"reasoningContent": {"reasoningText": {"text": "Hm " + text(self.random) + "."}}}]

    def answer(self) -> tuple[Message, str, Opened | None]:
        mark, thought = self.mark(), self.thought()
        opened = self.opened(Opened.MESSAGE, *([Opened.REASONING] if thought else []))
        if opened == Opened.REASONING:
            return {"role": "assistant", "content": _thought("Hm " + text(self.random) + mark)}, mark, opened
        content: list[ContentBlock] = [*thought, {"text": "So " + text(self.random) + mark}]
        return {"role": "assistant", "content": content}, mark, opened

    def calls(self) -> tuple[Message, str, Opened | None]:
        mark, content = self.mark(), self.thought()
        if self.features.remarks and self.random.random() < 0.3:
            content = [*content, {"text": "Look: " + text(self.random)}]
        n = self.random.randint(1, 3 if self.features.parallel else 1)
        for i in range(n):
            value: Any = {"at": text(self.random), "n": self.random.choice([None, True, 3, [1, "é"]])}
            last = mark if i == n - 1 else "no"
            content.append({"toolUse": {"toolUseId": f"call_{i}", "name": "look", "input": {**value, "zz": last}}})
        return {"role": "assistant", "content": content}, mark, self.opened(Opened.MESSAGE)

    def results(self, n: int) -> Message:
        content: list[ContentBlock] = []
        for i in self.random.sample(range(n), n):
            shown: list[Any] = [{"text": text(self.random, 12)} for _ in range(self.random.randint(0, 2))]
            if self.random.random() < 0.2:
                shown = [{"json": {"a": text(self.random), "b": [None, 1.5]}}]
            status: Any = self.random.choice(["success", "error"])
            content.append({"toolResult": {"toolUseId": f"call_{i}", "status": status, "content": shown}})
        return {
            "role": "user",
            "content": [*content, {"text": "And " + text(self.random)}] if self.random.random() < 0.2 else content,
        }

    def question(self) -> Message:
        return {
            "role": "user",
            "content": [{"text": "Q " + text(self.random)} for _ in range(self.random.randint(1, 2))],
        }


def _thought(words: str) -> list[ContentBlock]:
    return [{"reasoningContent": {"reasoningText": {"text": words}}}]


def rollout(random: Random, features: Features) -> Rollout:
    """Draw a conversation of one to four assistant turns, each followed by results or a question."""
    writer = _Writer(random, features)
    writer.messages.append(writer.question())
    turns: list[Turn] = []
    for _ in range(random.randint(1, 4)):
        calls = features.tools and random.random() < 0.6
        answered, mark, opened = writer.calls() if calls else writer.answer()
        uses = sum("toolUse" in block for block in answered["content"])
        new = [writer.results(uses) if uses else writer.question()]
        turns.append(Turn(list(writer.messages), answered, new, mark, opened))
        writer.messages += [answered, *new]
    system = "Be " + text(random) + "." if features.system and random.random() < 0.5 else None
    return Rollout(system, [LOOK] if features.tools else None, turns)


@dataclass(frozen=True)
class Expected:
    """What the template itself says of a turn.

    Attributes:
        last: The token that the policy sampled last, or None where it was cut off.
        delta: The ids after that; None where the template shows nothing of the turn to cut behind.
        whole: The whole rendering.
    """

    last: int | None
    delta: list[int] | None
    whole: str


def expected(template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn) -> Expected:
    """Cut the delta out of transformers' own rendering, after the turn's own word."""
    whole = render(template, tokenizer.chat_template, [*turn.before, turn.answered, *turn.new], drawn)
    at = whole.rfind(turn.mark)
    if at < 0:
        return Expected(None, None, whole)
    rest = whole[at + len(turn.mark) :]
    ids = encode(tokenizer, rest)
    controls = set(tokenizer.added_tokens_encoder.values())
    stop = next(i for i, token in enumerate(ids) if token in controls or token in template.stop_ids)
    stops = [i for i, token in enumerate(ids) if token in template.stop_ids]
    if turn.opened is None and not stops:  # gpt-oss: what ends an answer is written otherwise once a message follows
        return Expected(template.closer_id, ids[stop + 1 :], whole)
    stop = stops[0] if stops else stop
    if turn.opened is None:
        return Expected(ids[stop], ids[stop + 1 :], whole)
    if turn.opened == Opened.MESSAGE and "toolUse" in turn.answered["content"][-1]:
        token = tokenizer.convert_ids_to_tokens(ids[stop])
        head = rest[: rest.index(token)]
        return Expected(None, encode(tokenizer, rest[len(head.rstrip()) :]), whole)
    return Expected(None, ids, whole)


def encode(tokenizer: Any, plain: str) -> list[int]:
    return list(tokenizer.backend_tokenizer.encode(plain, add_special_tokens=False).ids)


def render(template: ChatTemplate, source: str, messages: Messages, drawn: Rollout, prompt: bool = True) -> str:
    """Render with transformers, as plain strings."""
    plain = json.loads(
        json.dumps(
            translated(template_messages(messages, drawn.system, message_format=template.rendering.message_format))
        )
    )
    (shown,), _ = render_jinja_template(
        [plain],
        translated(template_tools(drawn.tools)),
        None,
        source,
        add_generation_prompt=prompt,
        **template.arguments,
    )
    return str(shown)


def check(
    template: ChatTemplate, tokenizer: Any, drawn: Rollout
) -> Iterator[tuple[Turn, list[int], list[int], Expected]]:
    """Yield each turn with the delta found, the delta expected, and the whole story."""
    for turn in drawn.turns:
        truth = expected(template, tokenizer, drawn, turn)
        found = template.delta(
            turn.answered,
            turn.new,
            truth.last,
            opened=turn.opened or Opened.MESSAGE,
            tool_specs=drawn.tools or (),
            history=turn.before,
            system_prompt=drawn.system,
        ).ids.tolist()
        if truth.delta is not None:
            yield turn, found, truth.delta, truth
            continue
        # Reasoning that was cut off is stripped before a question: the rest must still end the whole rendering.
        inserted = (
            template.delta(turn.answered, turn.new, None, opened=Opened.REASONING)
            .provenance.tolist()
            .count(Provenance.INSERTED)
        )
        rest = tokenizer.backend_tokenizer.decode(found[inserted:], skip_special_tokens=False)
        yield turn, found, found if truth.whole.endswith(rest) else [], truth
