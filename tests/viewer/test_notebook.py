"""The console and notebook display of ledgers and trajectories."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from strands_tito.viewer import notebook
from support.drafts import make_draft
from support.scripted import tokenizer
from support.shown import ATTACKS, UUID, data_of, elements, hostile, rich
from support.vision import png
from tito_core.ledger import Image, Ledger, MediaSpan


def frame(html: str) -> dict[str, str | None]:
    ((tag, attributes),) = elements(html)
    assert tag == "iframe"
    return attributes


def test_a_ledger_is_one_line_of_facts() -> None:
    assert repr(rich()) == f"<Ledger {UUID}, task 'task': 3 turns, 2 leaves, 14 tokens, 8 sampled>"
    assert repr(Ledger(UUID)) == f"<Ledger {UUID}: 0 turns, 0 leaves, 0 tokens, 0 sampled>"
    assert repr(Ledger(UUID, task_id="a\nb\x1b")).isprintable()


def test_a_trajectory_is_one_line_of_facts() -> None:
    first, second = rich().trajectories()
    assert repr(first) == "<Trajectory: 2 turns, 11 tokens, 6 sampled, 6 trained here>"
    assert repr(second) == "<Trajectory: 2 turns, 10 tokens, 6 sampled, 0 trained here>"


@pytest.mark.parametrize("make", [rich, hostile, lambda: rich().trajectories()[1], lambda: hostile().trajectories()[0]])
def test_a_notebook_shows_the_page_in_a_sandboxed_frame(make: object) -> None:
    attributes = frame(make()._repr_html_())  # type: ignore[operator]
    assert attributes["sandbox"] == "allow-scripts", "with its own origin, or it could reach the notebook"
    data = data_of((attributes["srcdoc"] or "").encode())
    assert data["view"] == "rollout"
    assert data["turns"]


@pytest.mark.parametrize("part", [lambda ledger: ledger, lambda ledger: ledger.trajectories()[0]])
def test_a_notebook_shows_text_and_pictures(part: Callable[[Ledger], object], folder: str) -> None:
    image = Image(png(2, 2, 1), "png", 2, 2)
    ledger = Ledger(tokenizer=folder)
    media = (MediaSpan(0, 1, image.sha256, "png", 2, 2),)
    ledger.commit(make_draft(None, 0, [100], [200], media=media), images=[image])
    data = data_of((frame(part(ledger)._repr_html_())["srcdoc"] or "").encode())  # type: ignore[attr-defined]
    assert data["text"] is True
    assert data["pieces"] == {str(token): tokenizer().decode([token]) for token in (100, 200)}
    assert list(data["pictures"]) == [image.sha256.hex()]


def test_the_frame_of_a_hostile_ledger_is_one_element() -> None:
    html = hostile()._repr_html_()
    assert ATTACKS[0] not in html
    assert html.count("<") == 2, "the frame's own tags"


def test_a_long_ledger_is_shown_as_its_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "MAX_TOKENS", 13)
    shown = hostile()._repr_html_()
    assert "<iframe" not in shown
    assert "&lt;/script&gt;" in shown
    assert "tito view" in rich()._repr_html_()


@pytest.mark.parametrize(("package", "begins"), [("tito_core", "None"), ("strands_tito", "<iframe")])
def test_the_viewer_is_found_where_its_package_was_imported(package: str, begins: str) -> None:
    code = (
        f"import sys, {package}; from tito_core.ledger import Ledger; repr(Ledger());"
        "print([m for m in sys.modules if 'viewer' in m], Ledger()._repr_html_())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"[] {begins}")
