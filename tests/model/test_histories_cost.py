"""Finding a turn compares each message once (law 14)."""

from __future__ import annotations

from typing import Any

from support.drafts import make_draft
from tito_core.ledger import Ledger
from tito_core.turn.history import find_parent, opening_of, remember

ROUNDS = 400


class Counted(dict[str, Any]):
    """A message that counts its comparisons; `==` calls a subclass's method first, on either side."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return dict.__eq__(other, self)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def message(role: str, text: str) -> Any:
    return {"role": role, "content": [{"text": text}]}


def test_each_of_eight_hundred_messages_is_compared_once() -> None:
    ledger, state, messages = Ledger(), dict[str, Any](), list[Any]()
    opening = opening_of("Be brief.", None, "template")
    for number in range(ROUNDS):
        messages.append(message("user", f"question {number}"))
        place = find_parent(ledger, opening, messages, state)
        answer = message("assistant", f"answer {number}")
        draft = make_draft(place.parent, ledger.path_length(place.parent), [100], [200], branch=place.branch)
        remember(state, ledger, ledger.commit(draft, place.history, answer).index)
        messages.append(answer)
    shown = [Counted(each) for each in (*messages, message("user", "last"))]
    Counted.compared = 0
    place = find_parent(ledger, opening, shown, state)  # type: ignore[arg-type]
    assert (place.parent, place.path_messages, place.branch) == (ROUNDS - 1, 2 * ROUNDS, None)
    assert Counted.compared == 2 * ROUNDS
