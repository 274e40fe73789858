"""`tito view`: rollouts in a browser, or one in a file."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from strands_tito.terminal import VisibleConsole
from strands_tito.viewer.pictures import Pictures
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.server import Server
from strands_tito.viewer.site import Site
from strands_tito.viewer.token_text import TokenTexts

_PAGE = b"<!doctype html>"
"""How every page begins."""
Paths = Annotated[
    list[Path], typer.Argument(help="Files of rollouts, or folders of collected ones.", exists=True, metavar="PATH...")
]


def view(
    paths: Paths,
    html: Annotated[
        Path | None, typer.Option(help="Write one offline page to this file instead of serving pages.")
    ] = None,
    rollout: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of the rollout to open; twice for two side by side.")
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Tokenizer for the tokens' text; by default each rollout's own.")] = "",
    pictures: Annotated[
        Path | None, typer.Option(help="Folder with the pictures of prompts.", exists=True, file_okay=False)
    ] = None,
    base_url: Annotated[str, typer.Option(help="A server with the same weights, to re-score.")] = "",
    backend: Annotated[str, typer.Option(help="Backend of that server, such as an installed engine's name.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; by default a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show rollouts token by token in a browser: served on this machine, or as one offline file."""
    if base_url and not backend:
        raise typer.BadParameter("--base-url needs --backend, the backend of that server.")
    texts, rescoring = TokenTexts(tokenizer), (backend, base_url) if base_url else None
    with Rollouts(paths) as rollouts:
        numbers = _numbers(rollouts, rollout or [], is_file=html is not None)
        make = partial(Site, rollouts, texts, Pictures(pictures), rescoring)
        if html is None:
            _serve(make, _first_page(numbers), port, opens=browser)
        else:
            _write(html, make().two(*numbers) if len(numbers) == 2 else make().one(numbers[0]))


def _serve(make: Callable[[str], Site], first_page: str, port: int, *, opens: bool) -> None:
    try:
        server = Server(make, port)
    except OSError as error:
        raise typer.BadParameter(f"--port {port}: {error.strerror}. Leave it out for a free one.") from error
    with server:
        url = server.url + first_page
        _say(f"{url}\nCtrl-C ends it.")
        server.site.warm()
        if opens:
            webbrowser.open(url)
        server.serve_forever()


def _numbers(rollouts: Rollouts, given: list[int], *, is_file: bool) -> list[int]:
    """Check which rollouts are asked for; a single one need not be named."""
    held = len(rollouts)
    if held == 0:
        raise typer.BadParameter(f"{rollouts.title} holds no rollout yet.")
    if len(given) > 2:
        raise typer.BadParameter("--rollout names one rollout, or two to compare.")
    if beyond := [number for number in given if number > held]:
        raise typer.BadParameter(f"--rollout {beyond[0]}: {rollouts.title} holds {held} rollouts.")
    if not given and is_file and held > 1:
        raise typer.BadParameter(f"--html writes one rollout of the {held} in {rollouts.title}: add --rollout N.")
    return given or ([1] if held == 1 else [])


def _first_page(numbers: list[int]) -> str:
    return {0: "", 1: "rollout/{}", 2: "compare/{}/{}"}[len(numbers)].format(*numbers)


def _write(path: Path, content: bytes) -> None:
    """Write a page, also over an older one, but never over a file of something else, such as rollouts."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                there = file.read(len(_PAGE))
            if there not in (b"", _PAGE):
                raise typer.BadParameter(f"--html {path}: that file exists and is not a page. Name another.")
        path.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"--html {path}: {error.strerror}.") from error
    _say(f"Written to {path}, {len(content):,} bytes.")


def _say(text: str) -> None:
    VisibleConsole().print(text, markup=False, highlight=False, soft_wrap=True)
