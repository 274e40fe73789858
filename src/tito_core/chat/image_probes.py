"""The probe conversations that show whether a chat template renders images: one, several, in results, between texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from strands.types.content import Message, Messages

from tito_core.chat.probes import TOOLS, Case, assistant_message, call_message, result_message, user_message

USER, RESULT = "user messages", "tool results"
"""Places of images; each is certified by itself."""
_IMAGE: Any = {"image": {"format": "png", "source": {"bytes": b""}}}


def _text(number: int) -> dict[str, str]:
    return {"text": f"Look n{number:03}."}


def _user(*blocks: Any) -> Message:
    return {"role": "user", "content": list(blocks)}


def _answer(number: int) -> Message:
    return assistant_message(f"Seen n{number:03}.")


def _call(number: int, count: int = 1, first: int = 0) -> Message:
    return call_message(*(("look", {"at": f"the door n{number + i:03}."}) for i in range(count)), first=first)


_QUESTIONS: dict[str, list[Any]] = {
    "image before a text": [_IMAGE, _text(901)],
    "image after a text": [_text(901), _IMAGE],
    "image between texts": [_text(901), _IMAGE, _text(902)],
    "two images": [_text(901), _IMAGE, _IMAGE],
    "images and texts in turn": [_IMAGE, _text(901), _IMAGE, _text(902), _text(903)],
    "image alone": [_IMAGE],
}
_RESULTS: dict[str, list[list[Any]]] = {
    "result of a text and an image": [[_text(901), _IMAGE]],
    "result of an image and a text": [[_IMAGE, _text(901)]],
    "result of an image alone": [[_IMAGE]],
    "result of two images": [[_IMAGE, _text(901), _IMAGE]],
    "two results with images": [[_IMAGE, _text(901)], [_text(902), _IMAGE]],
}
_BEFORE: dict[str, Callable[[], Messages]] = {
    "first": lambda: [user_message("Why n001.")],
    "after an image": lambda: [_user(_text(1), _IMAGE)],
    "after an image and its answer": lambda: [_user(_IMAGE, _text(1)), _answer(2), user_message("Why n003.")],
}
_BEFORE_RESULTS: dict[str, Callable[[], Messages]] = {
    **_BEFORE,
    "after a result with an image": lambda: [
        user_message("Why n001."),
        _call(2, first=8),
        result_message([_text(3), _IMAGE], first=8),
    ],
}


def image_cases(place: str) -> Iterator[Case]:
    """Yield the probes of a place, `USER` or `RESULT`. Images that follow others find templates that number them."""
    if place == USER:
        for name, blocks in _QUESTIONS.items():
            for where, before in _BEFORE.items():
                yield Case(f"{name}, {where}", before(), _answer(500), [_user(*blocks)])
        return
    for name, results in _RESULTS.items():
        for where, before in _BEFORE_RESULTS.items():
            turn = _call(500, len(results))
            yield Case(f"{name}, {where}", before(), turn, [result_message(*results)], tools=TOOLS)
            if name == "result of a text and an image":
                new = [_user(*result_message(*results)["content"], _text(902), _IMAGE)]
                yield Case(f"{name}, and a question, {where}", before(), turn, new, tools=TOOLS)


def count_images(messages: Messages) -> int:
    """Return the number of images in messages."""
    results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
    blocks: list[Any] = [*messages, *results]
    return sum("image" in item for block in blocks for item in block["content"])
