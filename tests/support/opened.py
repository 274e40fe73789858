"""The viewer's pages, served or in a file, opened in a browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strands_tito.viewer.data import Pictures
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.site import Server, Site
from support.browser import Tab
from support.scripted import tokenizer
from support.shown import Texts

READY = "document.getElementById('page')?.dataset.ready"
"""An expression: milliseconds from navigation to the finished page."""
PROBES = (Path(__file__).parent.parent / "viewer" / "probes.js").read_text(encoding="utf-8")


@contextmanager
def served(*paths: Path, texts: Any = None, pictures: Path | None = None) -> Iterator[Server]:
    texts = texts or Texts(tokenizer())
    with (
        Rollouts(paths) as rollouts,
        Server(lambda home: Site(rollouts, texts, Pictures(pictures), home=home)) as server,
    ):
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def filed(folder: Path, *paths: Path, numbers: tuple[int, ...] = (1,), texts: Any = None) -> str:
    """Write a page to a file, and return its address."""
    with Rollouts(paths) as rollouts:
        site = Site(rollouts, texts or Texts(tokenizer()), Pictures())
        return written_page(folder, site.comparison(*numbers) if len(numbers) == 2 else site.rollout(*numbers))


def written_page(folder: Path, content: bytes) -> str:
    out = folder / "page.html"
    out.write_bytes(content)
    return out.as_uri()


async def open_page(page: Tab, url: str) -> None:
    await page.open(url)
    await page.until(READY)
    await page.run(PROBES)
