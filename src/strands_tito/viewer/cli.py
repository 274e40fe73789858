"""`tito view`: show rollouts in a browser or write one to an HTML file."""

from __future__ import annotations

import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from strands_tito.export.output_file import is_stdout, or_stdout, replacing
from strands_tito.viewer.data import Pictures, TokenTexts
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.site import Server, Site
from tito_engines.terminal import VisibleConsole

_PAGE = b"<!doctype html>"
"""First bytes of every page."""
Paths = Annotated[
    list[Path], typer.Argument(help="Rollout files, or folders of collected rollouts.", exists=True, metavar="PATH...")
]


def view(
    paths: Paths,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one rollout as an offline page, - for standard output.", callback=or_stdout),
    ] = None,
    rollout: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of the rollout to open; give it twice to compare two.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer that decodes the tokens; default: the one named in each rollout.")
    ] = "",
    pictures: Annotated[
        Path | None, typer.Option(help="Folder with the images of the prompts.", exists=True, file_okay=False)
    ] = None,
    base_url: Annotated[str, typer.Option(help="Server with the same weights, for re-scoring.")] = "",
    backend: Annotated[str, typer.Option(help="Backend of that server, such as the name of an installed engine.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; default: a free port.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show rollouts token by token in a browser, from a local server or as one offline file."""
    if base_url and not backend:
        raise typer.BadParameter("--base-url needs --backend: add the name of that server's backend.")
    texts, rescoring = TokenTexts(tokenizer), (backend, base_url) if base_url else None
    with Rollouts(paths) as rollouts:
        numbers = _numbers(rollouts, rollout or [], is_file=html is not None)
        make = partial(Site, rollouts, texts, Pictures(pictures), rescoring)
        if html is None:
            _serve(make, _first_page(numbers), port, opens=browser)
        else:
            _write(html, make().comparison(*numbers) if len(numbers) == 2 else make().rollout(numbers[0]))


def _serve(make: Callable[[str], Site], first_page: str, port: int, *, opens: bool) -> None:
    try:
        server = Server(make, port)
    except OSError as error:
        raise typer.BadParameter(f"--port {port}: {error.strerror}. Leave --port out to use a free port.") from error
    with server:
        url = server.url + first_page
        _print(f"{url}\nPress Ctrl-C to stop.")
        server.site.warm()
        if opens:
            webbrowser.open(url)
        server.serve_forever()


def _numbers(rollouts: Rollouts, numbers: list[int], *, is_file: bool) -> list[int]:
    """Check the numbers given by --rollout; with only one rollout in the files, that one is the default."""
    total = len(rollouts)
    if total == 0:
        raise typer.BadParameter(f"{rollouts.title} holds no rollout yet. Collect one first, or give another path.")
    if len(numbers) > 2:
        raise typer.BadParameter(f"--rollout was given {len(numbers)} times. Give it once, or twice to compare two.")
    if unknown := [number for number in numbers if number > total]:
        raise typer.BadParameter(f"--rollout {unknown[0]}: {rollouts.title} holds {total} rollouts.")
    if not numbers and is_file and total > 1:
        raise typer.BadParameter(f"--html writes one rollout, and {rollouts.title} holds {total}: add --rollout N.")
    return numbers or ([1] if total == 1 else [])


def _first_page(numbers: list[int]) -> str:
    return {0: "", 1: "rollout/{}", 2: "compare/{}/{}"}[len(numbers)].format(*numbers)


def _write(path: Path, content: bytes) -> None:
    """Write a page. Overwrite an older page, but no other file, such as a file of rollouts."""
    try:
        if path.is_file():
            with path.open("rb") as file:
                start = file.read(len(_PAGE))
            if start not in (b"", _PAGE):
                raise typer.BadParameter(f"--html {path}: the file exists and is not a page. Give another path.")
        with replacing(path) as part:
            part.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(f"--html {path}: {error.strerror or error}.") from error
    _print(f"Wrote {len(content):,} bytes to {path}.", stderr=is_stdout(path))


def _print(text: str, *, stderr: bool = False) -> None:
    VisibleConsole(stderr=stderr).print(text, markup=False, highlight=False, soft_wrap=True)
