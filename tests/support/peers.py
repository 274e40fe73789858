"""Other ways to find a turn's prompt, as plain functions over the same rendering, to be compared with ours."""

from __future__ import annotations

from typing import Any

from support.conversations import answer, user
from support.rollouts import Expected, Rollout, Turn, encode, render
from tito_core.chat.template import ChatTemplate


def sampled(
    template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn, last: int | None
) -> tuple[str, list[int]]:
    """Return a turn's prompt, and the ids of a policy that samples exactly what the template writes."""
    source = tokenizer.chat_template
    prompt = render(template, source, turn.before, drawn)
    alone = render(template, source, [*turn.before, turn.answered], drawn, prompt=False)
    body = alone[next((i for i, (a, b) in enumerate(zip(prompt, alone, strict=False)) if a != b), len(prompt)) :]
    body = body[: body.rfind(turn.mark) + len(turn.mark)] if turn.mark in body else body
    return prompt, [*encode(tokenizer, body), *([last] if last is not None else [])]


def rerendered_extends(template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn, truth: Expected) -> bool:
    """Re-rendering: return whether the next prompt, rendered from all messages, begins with what was sampled."""
    prompt, completion = sampled(template, tokenizer, drawn, turn, truth.last)
    path = [*encode(tokenizer, prompt), *completion]
    return encode(tokenizer, truth.whole)[: len(path)] == path


def fake_prefix(template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn) -> list[int] | None:
    """A fixed fake prefix: render a made-up question and answer with and without the new messages, and subtract."""
    fake, plain = [user("."), answer(".")], Rollout(None, None, [])
    try:
        base = render(template, tokenizer.chat_template, fake, plain, prompt=False)
        whole = render(template, tokenizer.chat_template, [*fake, *turn.new], plain)
    except Exception:  # templates raise whatever they like on messages that they do not take
        return None
    base = base.rstrip()  # the blank after the last closer is the next delta's
    return encode(tokenizer, whole[len(base) :]) if whole.startswith(base) else None


def counted_ends(
    template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn, truth: Expected
) -> list[int] | None:
    """Counting ends of turns: skip as many in the whole as the path holds, and take the rest."""
    prompt, completion = sampled(template, tokenizer, drawn, turn, truth.last)
    left = [*encode(tokenizer, prompt), *completion].count(template.closer_id)
    whole = encode(tokenizer, truth.whole)
    ends = [i for i, token in enumerate(whole) if token == template.closer_id]
    return whole[ends[left - 1] + 1 :] if 0 < left <= len(ends) else None
