"""The notebook display of ledgers and trajectories: the viewer's page in a sandboxed frame."""

from __future__ import annotations

from html import escape

from strands_tito.viewer.data import Evidence, TokenTexts, ledger_data, trajectory_data, urls_of
from strands_tito.viewer.site import page
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory

MAX_TOKENS = 50_000
"""Longest display in tokens. A notebook saves every output in its file, about 12 bytes a token."""
_HEIGHT = 720
_texts = TokenTexts()


def as_html(value: Ledger | Trajectory) -> str:
    """Return HTML for a notebook; for more than `MAX_TOKENS` tokens only the `repr`."""
    if isinstance(value, Ledger):
        tokens = sum(turn.own_length for turn in value)
        tokenizer, images, title = value.header.tokenizer, list(value.images.values()), f"Ledger {value.uuid[:8]}"
    else:
        tokens, tokenizer, images, title = len(value), value.tokenizer, list(value.images), "Trajectory"
    if tokens > MAX_TOKENS:
        return f"<pre>{escape(repr(value))}\nTo see its tokens, append it to a file and run: tito view FILE</pre>"
    evidence = Evidence(_texts.named(tokenizer), pictures=urls_of(images))
    data = ledger_data(value, evidence) if isinstance(value, Ledger) else trajectory_data(value, evidence)
    content = page("rollout", data | {"title": title}).decode()
    # The sandboxed frame has an origin of its own, so its script cannot reach the notebook or its kernel.
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(content)}" title="{escape(title)}" '
        f'style="width:100%;height:{_HEIGHT}px;border:1px solid #8884;border-radius:8px"></iframe>'
    )
