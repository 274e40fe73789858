"""Take the pictures of docs/view.md: `python tools/pages.py screenshots`. It needs a Chromium and Pillow.

Both engines sampled the rollouts of tests/viewer/real, and transformers re-scored one of them (`rescored.json`). A
scripted server gave the rollout with an image and changing weights.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from strands import Agent  # noqa: E402

from shapes import draw_shapes  # noqa: E402
from strands_tito import TITOModel  # noqa: E402
from strands_tito.inspect.verify import Rescored  # noqa: E402
from strands_tito.viewer.data import (  # noqa: E402
    Evidence,
    TokenText,
    ledger_data,
)
from strands_tito.viewer.site import page as make_page  # noqa: E402
from support.browser import Tab, tab  # noqa: E402
from support.opened import filed, open_page, served, written_page  # noqa: E402
from support.scripted import END, call, ids_of, tokenizer  # noqa: E402
from support.seeing import NAME, seeing  # noqa: E402
from support.shown import REAL, Texts, real, written  # noqa: E402
from tito_conformance.testing import Completion  # noqa: E402
from tito_core.ledger import Ledger  # noqa: E402

FOCUS = "(document.querySelector('{}').focus())"
MODE = "(document.querySelector('input[value={}]').click())"


@dataclass(frozen=True, slots=True)
class Shot:
    """A picture: its name, the page, the window, and what happens before: keys, or scripts in parentheses."""

    name: str
    url: str
    height: int
    steps: Sequence[str] = ()
    width: int = 1440
    dark: bool = False


def shots(home: str, rescored: str, pictures: str) -> list[Shot]:
    """Return every picture of the page."""
    mark = (FOCUS.format(".tokens"), "n", "n")  # the second mark of this rollout is drift in its last answer
    record = "(document.querySelector('.turn-head summary').click())"
    last = "(scrollTo(0, document.body.scrollHeight))"
    return [
        Shot("view-rollout", f"{home}rollout/3", 720, mark),
        Shot("view-branch", f"{home}rollout/4#turn-2", 760, (record,)),
        Shot("view-rescored", rescored, 860, (MODE.format("difference"), *mark)),
        Shot("view-collection", home, 800),
        Shot("view-compare", f"{home}compare/1/4", 860, (FOCUS.format(".side .tokens"), "ArrowLeft")),
        Shot("view-pictures", pictures, 800, (MODE.format("version"), last)),
        Shot("view-narrow", f"{home}rollout/3", 844, mark, width=390, dark=True),
    ]


async def take(folder: Path) -> None:
    """Take every picture."""
    with TemporaryDirectory() as place, served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        (Path(place) / "rescored").mkdir()
        (Path(place) / "pictures").mkdir()
        rescored, pictures = rescored_page(Path(place, "rescored")), await pictures_page(Path(place, "pictures"))
        async with tab() as page:
            for shot in shots(server.url, rescored, pictures):
                await taken(page, shot, folder / f"{shot.name}.png")


async def taken(page: Tab, shot: Shot, out: Path) -> None:
    """Open a page, do its steps and write its picture with a palette."""
    await page.look(width=shot.width, height=shot.height, dark=shot.dark)
    await open_page(page, shot.url)
    await page.until("!document.querySelector('[role=status]').textContent.includes('reading')")
    await page.send("Emulation.setScrollbarsHidden", hidden=True)
    for step in shot.steps:
        await (page.run(step) if step.startswith("(") else page.press(step))
    await asyncio.sleep(0.5)  # chunks that came near are drawn
    await page.picture(out)
    await page.run("localStorage.clear()")
    reduce(out)


def reduce(path: Path) -> None:
    """Give a picture a palette."""
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


def rescored_page(folder: Path) -> str:
    """Write the page of a rollout with its differences, and return its address."""
    found = json.loads((REAL / "rescored.json").read_text(encoding="utf-8"))
    differences = {int(turn): np.array(values, np.float32) for turn, values in found["differences"].items()}
    turns = tuple((turn, np.arange(len(values)), values) for turn, values in differences.items())
    rescored = Rescored(np.concatenate(list(differences.values())), 0, by_turn=turns)
    with real("vllm") as rollouts:
        data = ledger_data(rollouts.load(3), Evidence(TokenText(tokenizer()), rescored))
    without: dict[str, Any] = {"mismatches": []}  # the file holds differences without their signs
    return written_page(folder, make_page("rollout", data | without | {"title": "Rollout 3, vllm.tito"}))


async def pictures_page(folder: Path) -> str:
    """Write the page of a rollout with a picture, sampled by three versions of the weights; return its address."""
    ledger = await looked()
    return filed(folder, written(folder, ledger, name="shapes.tito"), texts=Texts(tokenizer(NAME)))


async def looked() -> Ledger:
    """Run an agent that looks at a picture on a scripted server, whose weights change while it answers."""
    asked = ids_of(call("draw_shapes", '{"shape": "circle", "count": "three", "colour": "blue"}') + END, NAME)
    seen = ids_of("I see three circles on a white ground. All of them are blue." + END, NAME)
    spans = [("step-17", 0, 6), ("step-18", 6, 11), ("step-19", 11, len(seen))]
    answers = {1: Completion(asked, weight_versions=[("step-17", 0, len(asked))])}

    def script(request: Any) -> Completion:
        return answers.pop(1, None) or Completion(seen, weight_versions=spans)

    random.seed(3)  # places of the shapes
    _, policy = seeing("sglang", script)
    model = TITOModel.of(policy)
    await Agent(model=model, tools=[draw_shapes], callback_handler=None).invoke_async(
        "Draw some circles and count them."
    )
    return model.ledger


def main() -> None:
    """Take the pictures of the page into docs/images."""
    asyncio.run(take(ROOT / "docs/images"))


if __name__ == "__main__":
    main()
