"""What a notebook shows of a ledger or a trajectory: the viewer's page, in a frame that can reach nothing."""

from __future__ import annotations

from html import escape

from strands_tito.viewer.page import page
from strands_tito.viewer.rollout import Evidence, ledger_data, trajectory_data
from strands_tito.viewer.token_text import TokenTexts
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory

SHOWN_TOKENS = 50_000
"""Most tokens of what a notebook shows: it keeps every output in its file, at some 12 bytes a token."""
_HEIGHT = 720
_texts = TokenTexts()


def as_html(shown: Ledger | Trajectory) -> str:
    """Return HTML for a notebook; of more than `SHOWN_TOKENS` tokens only the one line that `repr` gives."""
    if isinstance(shown, Ledger):
        tokens = sum(turn.own_length for turn in shown)
        evidence = Evidence(_texts.of(shown.header.tokenizer))
        title = f"Ledger {shown.uuid[:8]}"
    else:
        tokens, evidence, title = len(shown), Evidence(), "Trajectory"
    if tokens > SHOWN_TOKENS:
        return f"<pre>{escape(repr(shown))}\nTo see its tokens, append it to a file and run: tito view FILE</pre>"
    data = ledger_data(shown, evidence) if isinstance(shown, Ledger) else trajectory_data(shown, evidence)
    content = page("rollout", data | {"title": title}).decode()
    # Scripts run in the frame, in an origin of its own: it sees neither the notebook nor its kernel.
    return (
        f'<iframe sandbox="allow-scripts" srcdoc="{escape(content)}" title="{escape(title)}" '
        f'style="width:100%;height:{_HEIGHT}px;border:1px solid #8884;border-radius:8px"></iframe>'
    )
