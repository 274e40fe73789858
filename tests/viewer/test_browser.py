"""Pages in a real, headless Chromium: `make browser`."""

from __future__ import annotations

import asyncio
from html import escape
from pathlib import Path

import numpy as np
import pytest

from strands_tito.viewer.rollouts import Rollouts
from support.browser import Tab
from support.drafts import make_draft
from support.made_up import add_ends
from support.opened import READY, filed, open_page, served
from support.scripted import ids_of, tokenizer
from support.shown import ATTACKS, REAL, UUID, Texts, hostile, hostile_tokenizer, ledger_of_calls, rich, written
from tito_core.ledger import CallRecord, Column, Ledger
from tito_core.parsing.completion import CallStatus

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
OPENS_WITHIN_MS = 2000


def words(ids: list[int]) -> str:
    return str(tokenizer().decode(ids)).replace("\n", "↵\n")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_tokens_stand_in_the_order_that_the_engine_saw_them(
    page: Tab, tmp_path: Path, kind: str, number: int
) -> None:
    path = REAL / f"{kind}.tito"
    with Rollouts([path]) as rollouts:
        ledger = rollouts.load(number)
    url = filed(tmp_path, path, numbers=(number,))
    await open_page(page, url)
    first = ledger.trajectories()[0]
    assert await page.run("textOf(document)") == words(first.token_ids.tolist())
    assert set(page.requests) <= {url, "data:,"}, "one file, and no network"
    shown = await page.run("document.querySelector('.reward').textContent")
    assert shown == f"reward {ledger.annotation('reward')}"
    malformed = sum(call.status in ("malformed", "truncated") for turn in first.path for call in turn.draft.calls)
    assert await page.run("document.querySelectorAll('#tokens .note.bad').length") == malformed
    if malformed:
        reason = next(c.reason for turn in first.path for c in turn.draft.calls if c.reason)
        assert reason in await page.run("document.querySelector('#tokens .note.bad').textContent")


async def test_each_status_of_a_call_is_told_apart(page: Tab, tmp_path: Path) -> None:
    await open_page(page, filed(tmp_path, written(tmp_path, ledger_of_calls())))
    notes = await page.run(
        "[...document.querySelectorAll('#tokens .note')].map((note) => [note.className, note.textContent])"
    )
    kinds = {
        status: kind.split()[1] for kind, text in notes for status in CallStatus if f" {status}: why {status}" in text
    }
    assert kinds == {"ok": "ok", "lenient": "ok", "malformed": "bad", "truncated": "bad", "suspect": "suspect"}
    chips = await page.run("[...document.querySelectorAll('.chips .chip')].map((chip) => chip.textContent)")
    assert {"2 malformed or cut-off calls", "1 text like a call"} <= set(chips)


async def test_keys_go_from_token_to_token_and_show_each_in_full(page: Tab, tmp_path: Path) -> None:
    with Rollouts([REAL / "vllm.tito"]) as rollouts:
        draft = rollouts.load(1)[0].draft
    await open_page(page, filed(tmp_path, REAL / "vllm.tito"))
    for _ in range(40):
        await page.press("Tab")
        if await page.run("document.activeElement.id === 'tokens'"):
            break
    await page.press("j")
    found = await page.run("facts()")
    token, logprob = int(draft.output_ids[0]), float(draft.logprobs[0])
    assert found["token"] == str(token)
    assert found["turn"] == "0, output token 0"
    assert found["bytes"] == tokenizer().decode([token]).encode().hex(" ")
    assert float(found["logprob"].split()[0]) == pytest.approx(logprob, rel=1e-3)
    likeliest = await page.run("likeliestIds()")
    assert likeliest == [str(token) for token in draft.extras["top_ids"].values[0]]
    assert "token" in await page.run("document.querySelector('[role=status]').textContent")
    await page.press("ArrowRight")
    assert (await page.run("facts()"))["turn"] == "0, output token 1"
    await page.press("k")
    await page.press("k")
    assert (await page.run("facts()"))["turn"] == "0, prompt token 0"


async def test_each_mode_has_its_legend_and_its_colours(page: Tab, tmp_path: Path) -> None:
    await open_page(page, filed(tmp_path, REAL / "vllm.tito"))
    await page.press("j")
    assert await page.run("document.activeElement.id") == "tokens", "keys need no Tab before"
    colours = set()
    for mode in ("provenance", "logprob", "entropy", "version", "trained"):
        await page.click(f"input[value={mode}]")
        assert await page.run("document.querySelectorAll('.legend li').length") > 4
        colours.add(await page.run("getComputedStyle(document.querySelector('.t.current')).backgroundColor"))
    assert len(colours) >= 4
    assert await page.run("document.querySelector('input[value=difference]').disabled"), "nothing was re-scored"


async def test_a_branch_leads_to_where_it_left_and_to_its_own_path(page: Tab, tmp_path: Path) -> None:
    url = filed(tmp_path, written(tmp_path, rich()))
    await open_page(page, url)
    assert await page.run("turns()") == "Turn 0,Turn 1"
    await page.run("document.querySelector('[data-turn=\"2\"]').click()")
    assert await page.run("turns()") == "Turn 0,Turn 2"
    assert "retry, from turn 1" in await page.run("document.querySelector('button.branch').textContent")
    assert "context here" in await page.run("document.querySelector('section.turn').textContent")
    await page.click("button.branch")
    assert await page.run("turns()") == "Turn 0,Turn 1"
    await page.run("location.hash = '#turn-2'")
    await page.until("turns() === 'Turn 0,Turn 2'")


async def test_pictures_show(page: Tab, tmp_path: Path) -> None:
    from hashlib import sha256

    from tito_core.ledger import MediaSpan

    folder = tmp_path / "pictures"
    folder.mkdir()
    await page.look(width=64, height=64)
    await page.picture(folder / "one.png")
    digest = sha256((folder / "one.png").read_bytes()).digest()
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100, 101, 102], [200], media=(MediaSpan(1, 2, digest),)))
    await page.look()
    with served(written(tmp_path, ledger), pictures=folder) as server:
        await open_page(page, f"{server.url}rollout/1")
        assert await page.until("document.querySelector('.media img')?.naturalWidth") == 64


async def test_two_rollouts_part_at_the_first_token_that_differs(page: Tab) -> None:
    with served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        await open_page(page, f"{server.url}compare/2/4")
        with Rollouts([REAL / "vllm.tito", REAL / "sglang.tito"]) as rollouts:
            left, right = (rollouts.load(number).trajectories()[0].token_ids for number in (2, 4))
        most = min(len(left), len(right))
        same = np.flatnonzero(left[:most] != right[:most])
        common = int(same[0]) if len(same) else most
        assert f"The first {common:,} tokens are the same" in await page.run(
            "document.querySelector('.shared summary').textContent"
        )
        sides = await page.run("[...document.querySelectorAll('.side')].map(textOf)")
        assert sides == [words(left[common:].tolist()), words(right[common:].tolist())]
        differs = await page.run(
            "[...document.querySelectorAll('.differs tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        assert ["backend", "vllm", "sglang"] in differs
        await page.press("n")
        assert await page.run("document.activeElement.closest('.side .tokens') !== null")


async def test_a_comparison_names_the_sampling_parameters_that_differ_and_only_those(page: Tab) -> None:
    with served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        await open_page(page, f"{server.url}compare/1/5")
        rows = await page.run(
            "[...document.querySelectorAll('.differs tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
    with Rollouts([REAL / "vllm.tito", REAL / "sglang.tito"]) as rollouts:
        seeds = [str(rollouts.load(number)[0].draft.sampling["seed"]) for number in (1, 5)]
    assert [row for row in rows if row[0].startswith("sampling")] == [["sampling seed", *seeds]]


async def test_a_table_sorts_searches_and_leads_to_rollouts(page: Tab) -> None:
    with served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        await open_page(page, server.url)
        await page.until("!document.querySelector('[role=status]').textContent.includes('reading')")
        assert await page.run("cells(1)") == ["1", "2", "3", "4", "5", "6"]
        await page.click("[data-key=sampled]")
        names = await page.run("headings()")
        sampled = [int(value) for value in await page.run(f"cells({names.index('sampled ↓')})")]
        assert sampled == sorted(sampled, reverse=True)
        assert await page.run("document.querySelector('[aria-sort=descending]').textContent") == "sampled ↓"
        await page.run("search('SGLang')")
        assert sorted(await page.run("cells(1)")) == ["4", "5", "6"]
        await page.run(
            "[...document.querySelectorAll('input[type=checkbox]')].slice(0, 2).forEach((tick) => tick.click())"
        )
        assert "compare" in await page.run("document.querySelector('a.button').getAttribute('href')")
        await page.click(".rollouts a")
        await page.until("!!document.querySelector('.tokens')")


async def test_no_content_acts_is_styled_or_is_fetched(page: Tab, tmp_path: Path) -> None:
    path = written(tmp_path, hostile(), hostile(UUID.replace("1", "2")))
    texts = Texts(hostile_tokenizer())
    expected = {"hit": None, "links": 0, "made": 0, "shown": True, "display": "block"}
    with served(path, texts=texts) as server:
        addresses = [
            server.url,
            f"{server.url}rollout/1",
            f"{server.url}compare/1/2",
            filed(tmp_path, path, texts=texts),
        ]
        for address in addresses:
            await open_page(page, address)
            await page.run("clickEverything()")
            await asyncio.sleep(0.3)
            assert await page.run("brought()") == expected, address
            assert "attack.invalid" not in " ".join(page.requests)


async def test_what_would_be_content_turned_to_markup_is_refused_by_the_policy(page: Tab, tmp_path: Path) -> None:
    """The page makes no markup of content; were it to, Chromium would refuse to run or to load any."""
    await open_page(page, filed(tmp_path, written(tmp_path, rich())))
    assert await page.run(f"refusesMarkup({ATTACKS[1]!r})") == "TypeError"
    await page.run("attempt()")
    await asyncio.sleep(0.3)
    assert await page.run("[window.hit ?? null, getComputedStyle(document.querySelector('main')).display]") == [
        None,
        "block",
    ]
    errors = " ".join(page.errors)
    for rule in ("style-src", "img-src", "form-action", "frame-src", "Trusted"):
        assert rule in errors, rule
    page.errors.clear()


async def test_a_notebooks_frame_shows_the_rollout_and_cannot_reach_the_notebook(page: Tab, tmp_path: Path) -> None:
    out = tmp_path / "notebook.html"
    reach = escape("<script>try { parent.document.body; parent.reached = 1; } catch { }</script>")
    other = f"<iframe sandbox='allow-scripts' srcdoc='{reach}'></iframe>"
    out.write_text(f"<!doctype html><body>{hostile()._repr_html_()}{other}</body>")
    await page.open(out.as_uri())
    await asyncio.sleep(0.5)
    assert await page.run("window.hit ?? window.reached ?? null") is None
    assert await page.run("document.querySelector('iframe').contentDocument") is None, "an origin of its own"
    frame = await page.frame_text()
    assert "Ledger 00000001" in frame
    assert "<script>window.hit=1</script>" in frame


@pytest.mark.parametrize("turns", [8, 32])
async def test_128k_tokens_open_within_two_seconds_and_scroll_smoothly(page: Tab, tmp_path: Path, turns: int) -> None:
    url = filed(tmp_path, written(tmp_path, long_rollout(turns)))
    opened, gaps = [], []
    for _ in range(3):  # other work shares the machine
        await open_page(page, url)
        opened.append(int(await page.run(READY)))
        every = await page.run("frameGaps()")
        gaps.append(every[int(len(every) * 0.95)])
        assert await page.run("scrollY") > 10_000
    size = (tmp_path / "page.html").stat().st_size / 1e6
    print(
        f"{4 * turns},000 tokens, {size:.1f} MB: opened in {min(opened)} to {max(opened)} ms, "
        f"95% of frames within {min(gaps):.0f} to {max(gaps):.0f} ms"
    )
    assert min(opened) < OPENS_WITHIN_MS
    assert min(gaps) < 100
    assert await page.run("document.querySelectorAll('*').length") < 20_000, "only what is near is made of elements"
    assert len(await page.run("textOf(document)")) > 9_000 * turns, "all of it can be found"


@pytest.mark.parametrize("count", [1_000, 10_000])
async def test_ten_thousand_rollouts_list_within_two_seconds(page: Tab, tmp_path: Path, count: int) -> None:
    folder = many_rollouts(tmp_path / "many", count)
    opened = []
    with served(folder) as server:
        for _ in range(3):
            await open_page(page, server.url)
            opened.append(int(await page.run(READY)))
            assert f"{count:,} of {count:,} rollouts" in await page.run(
                "document.querySelector('[role=status]').textContent"
            )
    print(f"{count:,} rollouts: listed in {min(opened)} to {max(opened)} ms")
    assert min(opened) < OPENS_WITHIN_MS


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_texts_have_contrast_in_every_mode(page: Tab, tmp_path: Path, dark: bool) -> None:
    await open_page(page, filed(tmp_path, REAL / "sglang.tito", numbers=(2,)))
    await page.look(dark=dark)
    await page.until(f"document.documentElement.dataset.theme === '{'dark' if dark else 'light'}'")
    await page.run("document.querySelector('.tokens').focus()")
    await page.press("j")
    for mode in ("provenance", "logprob", "entropy", "version", "trained"):
        await page.click(f"input[value={mode}]")
        await page.settle()
        assert await page.run("faint()") == [], mode


@pytest.mark.parametrize("view", ["", "rollout/2", "compare/2/5"])
async def test_narrow_windows_need_no_sideways_scrolling(page: Tab, view: str) -> None:
    await page.look(width=360, height=740)
    with served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        await open_page(page, server.url + view)
        await page.settle()
        assert await page.run("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("view", ["", "rollout/2", "compare/2/5"])
async def test_screen_readers_have_a_name_for_everything_that_acts(page: Tab, view: str) -> None:
    with served(REAL / "vllm.tito", REAL / "sglang.tito") as server:
        await open_page(page, server.url + view)
        await page.settle()
        nodes = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    acting = [
        (role, name)
        for role, name in seen
        if role
        in (
            "button",
            "link",
            "radio",
            "checkbox",
            "searchbox",
            "combobox",
            "image",
            "navigation",
            "complementary",
        )
    ]
    assert len(acting) > 5
    assert [one for one in acting if not one[1].strip()] == []
    roles = {role for role, _ in seen}
    assert {"main", "heading", "status"} <= roles


def long_rollout(turns: int) -> Ledger:
    """Turns of 4,000 tokens each, with text, calls and the likeliest five."""
    rng = np.random.default_rng(0)
    text = ids_of(
        "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("collect.md", "quickstart.md"))
    )
    ledger = Ledger()
    for turn in range(turns):
        prompt, output = (np.resize(np.roll(text, -shift * turn), size) for shift, size in ((37, 3000), (91, 1000)))
        start = 4000 * turn
        logprobs = -rng.exponential(0.5, 1000).astype(np.float32)
        top_ids = np.concatenate([output[:, None], rng.integers(0, 40_000, (1000, 4))], axis=1)
        top = np.concatenate([logprobs[:, None], np.repeat(logprobs[:, None] - 1, 4, axis=1)], axis=1)
        ledger.commit(
            make_draft(
                turn - 1 if turn else None, start, prompt.tolist(), output.tolist(), logprobs=logprobs,
                calls=(CallRecord("look", "ok", 10, 40),),
                extras={"top_ids": Column.of(start + 3000, top_ids), "top_logprobs": Column.of(start + 3000, top)},
            )
        )  # fmt: skip
    return ledger


def many_rollouts(folder: Path, count: int) -> Path:
    """A folder with so many END records; the ledgers, of which it has one, are read only by who opens them."""
    from viewer.test_rollouts import collected

    add_ends(collected(folder, 1), count)
    return folder
