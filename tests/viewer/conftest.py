"""Close every file that a test opens; a headless Chromium for a module's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from pytest_asyncio import fixture

from strands_tito.viewer.rollouts import Rollouts
from support.browser import Tab, tab


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[Rollouts] = []
    init = Rollouts.__init__

    def record_and_init(self: Rollouts, *arguments: Any) -> None:
        opened.append(self)
        init(self, *arguments)

    monkeypatch.setattr(Rollouts, "__init__", record_and_init)
    yield
    for rollouts in opened:
        rollouts.close()


@fixture(loop_scope="module", scope="module")
async def chromium() -> AsyncIterator[Tab]:
    async with tab() as opened:
        yield opened


@fixture(loop_scope="module")
async def page(chromium: Tab) -> AsyncIterator[Tab]:
    """A page on which no browser error may occur."""
    for kept in (chromium.requests, chromium.errors, chromium.dialogs):
        kept.clear()
    await chromium.look()
    yield chromium
    await chromium.run("(() => { try { localStorage.clear(); } catch { } })()")  # a mode or theme that was chosen
    await chromium.open("about:blank")  # its server is gone
    assert chromium.errors == []
    assert chromium.dialogs == []
