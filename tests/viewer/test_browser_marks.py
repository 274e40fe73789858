"""What a rollout's page says about a token and a turn, and what the table says about all rollouts, in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from strands_tito.inspect.verify import Rescored
from strands_tito.viewer.data import Evidence, TokenText, ledger_data
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.site import page as make_page
from support.browser import Tab
from support.drafts import make_draft
from support.opened import filed, open_page, served, written_page
from support.scripted import tokenizer
from support.shown import REAL, real, rich, written
from tito_core.ledger import Ledger, Provenance
from viewer.test_rollouts import collected

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]
BOTH = (REAL / "vllm.tito", REAL / "sglang.tito")
UNFOLD = "document.querySelectorAll('.chunk').forEach((chunk) => chunk.scrollIntoView())"


async def labels_of(page: Tab, kind: str) -> list[str]:
    """Return the text of each token with a mark."""
    found = await page.run(f"[...document.querySelectorAll('.tokens .t.{kind}')].map((token) => token.textContent)")
    return list(found)


def piece(token: int) -> str:
    return str(tokenizer().decode([token])).replace("\n", "↵\n")


@pytest.mark.parametrize("path", BOTH, ids=["vllm", "sglang"])
async def test_pointing_at_a_token_shows_it_and_a_click_keeps_it(page: Tab, tmp_path: Path, path: Path) -> None:
    with Rollouts([path]) as rollouts:
        draft = rollouts.load(1)[0].draft
    await open_page(page, filed(tmp_path, path))
    await page.run("document.querySelector('.output').scrollIntoView({ block: 'center' })")
    await page.until("document.querySelectorAll('.output .t').length > 3")
    places = await page.run(
        "[...document.querySelectorAll('.output .t')].slice(1, 3).map((token) => token.getBoundingClientRect())"
        ".map((box) => [box.x + box.width / 2, box.y + box.height / 2])"
    )
    for at, (x, y) in enumerate(places, 1):
        await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        found = await page.run("facts()")
        assert found["token"] == str(draft.output_ids[at])
        assert found["turn"] == f"0, output token {at}"
        assert found["place"].startswith(f"{len(draft.prompt_ids) + at:,} of ")
        assert float(found["logprob"].split()[0]) == pytest.approx(float(draft.logprobs[at]), rel=1e-3)
    for kind in ("mousePressed", "mouseReleased"):
        await page.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    (x, y) = places[0]
    await page.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert (await page.run("facts()"))["turn"] == "0, output token 2", "a click keeps its token"


async def test_stop_tokens_and_inserted_closers_are_marked(page: Tab, tmp_path: Path) -> None:
    closer = stop = int(tokenizer().convert_tokens_to_ids("<|im_end|>"))
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200, 201], stop=None, finish="length"))
    kinds = np.array([Provenance.INSERTED, Provenance.PROMPT], np.uint8)
    ledger.commit(make_draft(0, 4, [closer, 104], [205, stop], prompt_provenance=kinds, stop=stop))
    await open_page(page, filed(tmp_path, written(tmp_path, ledger)))
    assert await labels_of(page, "inserted") == [piece(closer)]
    assert await labels_of(page, "stop") == [piece(stop)]
    heads = await page.run("[...document.querySelectorAll('.turn-head')].map((head) => head.textContent)")
    assert "length" in heads[0]
    assert "1 token inserted" in heads[1]
    looks = await page.run(
        "['inserted', 'stop'].map((kind) => getComputedStyle(document.querySelector(`.tokens .t.${kind}`)))"
        ".map((style) => [style.outlineStyle, style.boxShadow, style.borderStyle].join())"
    )
    plain = await page.run(
        "(({ outlineStyle, boxShadow, borderStyle }) => [outlineStyle, boxShadow, borderStyle].join())"
        "(getComputedStyle(document.querySelector('.tokens .t.p0')))"
    )
    assert len({*looks, plain}) == 3, "each mark has a look of its own"


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("number", [1, 2, 3])
async def test_the_tokens_that_drift_and_only_they_are_marked(
    page: Tab, tmp_path: Path, kind: str, number: int
) -> None:
    with real(kind) as rollouts:
        first = rollouts.load(number).trajectories()[0]
    expected = []
    for turn in first.path:
        ids = turn.draft.output_ids.tolist()
        for start, stop, _ in TokenText(tokenizer()).drift(ids):
            expected += [piece(token) for token in ids[start:stop]]
    await open_page(page, filed(tmp_path, REAL / f"{kind}.tito", numbers=(number,)))
    await page.run(UNFOLD)
    await page.settle()
    assert await labels_of(page, "drift") == expected


async def test_drift_is_seen_inside_a_malformed_call_as_outside(page: Tab, tmp_path: Path) -> None:
    await open_page(page, filed(tmp_path, REAL / "vllm.tito", numbers=(3,)))
    await page.run(UNFOLD)
    await page.until("document.querySelectorAll('.t.drift').length > 3")
    inside, call, outside, plain = [
        await page.run(f"lookOf('.output .t{kind}')")
        for kind in (".call.bad.drift", ".call.bad:not(.drift)", ".drift:not(.call)", ":not(.call, .drift, .stop)")
    ]
    differs = {name for name in inside if inside[name] != call[name]}
    assert differs == {name for name in outside if outside[name] != plain[name]} != set()
    assert {name: inside[name] for name in differs} == {name: outside[name] for name in differs}
    assert inside["textDecoration"] == call["textDecoration"], "the call keeps its own mark"


async def test_the_re_scored_mode_shows_how_far_each_token_is_off(page: Tab, tmp_path: Path) -> None:
    with real("vllm") as rollouts:
        ledger = rollouts.load(1)
        sampled = ledger[0].draft.columns.output
        differences = np.zeros(sampled, np.float32)
        differences[1:3] = 2e-3, 0.5
        rescored = Rescored(differences, 0, by_turn=((0, np.arange(sampled), differences),))
        data = ledger_data(ledger, Evidence(TokenText(tokenizer()), rescored)) | {"title": "one"}
    await open_page(page, written_page(tmp_path, make_page("rollout", data)))
    await page.click("input[value=difference]")
    await page.run(UNFOLD)  # tokens out of sight are plain text
    await page.until("document.querySelectorAll('.output .t').length")
    steps = await page.run(
        "[...document.querySelectorAll('.output .t')].slice(0, 4).map((token) => token.classList[1])"
    )
    assert steps == ["s0", "s3", "s6", "s0"]
    await page.run("document.querySelector('.tokens').focus()")
    await page.press("j")
    assert (await page.run("facts()"))["re-scored"] == "exactly the same"
    await page.press("ArrowRight")
    assert (await page.run("facts()"))["re-scored"] == "differs by 2.0e-3 nats"
    await page.click("details.mismatch summary")
    table = await page.run(
        "[...document.querySelectorAll('.mismatch tr')].map((row) => [...row.children].map((cell) => cell.innerText))"
    )
    assert table[1][:2] == ["all", str(sampled)]
    assert table[2][0] == "turn 0"
    assert [row[0] for row in table[3:6]] == ["position 0", "position 1", "positions 2 to 3"]
    assert table[3][2:] == ["0", "0", "100.0%", "0.0%"]


async def test_the_weights_mode_has_a_colour_for_each_version(page: Tab, tmp_path: Path) -> None:
    ledger = rich()
    await open_page(page, filed(tmp_path, written(tmp_path, ledger)))
    await page.click("input[value=version]")
    spans = ledger[0].draft.engine.versions
    expected = [f"v{number}" for number, span in enumerate(spans) for _ in range(span.start, span.stop)]
    found = await page.run(
        "[...document.querySelectorAll('.output')][0].querySelectorAll('.t').values()"
        ".map((token) => token.classList[1]).toArray()"
    )
    assert len(set(expected)) > 1
    assert found == expected
    await page.run("document.querySelector('.tokens').focus()")
    await page.press("j")
    assert (await page.run("facts()"))["weights"] == str(spans[0].version)


@pytest.mark.parametrize("path", BOTH, ids=["vllm", "sglang"])
async def test_a_turns_engine_record_the_reward_and_the_termination_are_shown(
    page: Tab, tmp_path: Path, path: Path
) -> None:
    with Rollouts([path]) as rollouts:
        ledger = rollouts.load(1)
    await open_page(page, filed(tmp_path, path))
    engine = ledger[0].draft.engine
    await page.click(".turn-head summary")
    record = await page.run(
        "Object.fromEntries([...document.querySelectorAll('.turn-head')][0].querySelectorAll('dt').values()"
        ".map((name) => [name.textContent, name.nextSibling.innerText]))"
    )
    assert record["request"] == engine.request_id
    assert record["latency"] == f"{engine.latency_s:.3f} s"
    assert record["model"] == engine.server.model
    assert engine.server.semantics.source in record["logprobs"]
    sampling = dict(ledger[0].draft.sampling)
    pairs = await page.run(
        "[...document.querySelector('.turn-head').querySelectorAll('.pair')].map((pair) => pair.textContent)"
    )
    assert pairs == [f"{name} {msgspec.json.encode(value).decode()}" for name, value in sampling.items()]
    head = await page.run("document.querySelector('.head').innerText")
    for name in ("reward", "termination"):
        assert f"{name}{' ' if name == 'reward' else ': '}{ledger.annotation(name)}" in " ".join(head.split())


async def test_the_table_has_every_named_column_charts_and_rewards_by_group(page: Tab, tmp_path: Path) -> None:
    folder = collected(tmp_path / "folder", 6)
    with served(folder, *BOTH) as server:
        await open_page(page, server.url)
        await page.until("!document.querySelector('[role=status]').textContent.includes('reading')")
        names = await page.run("headings()")
        columns = ("task", "group", "reward", "turns", "tokens", "malformed", "drift", "termination")
        assert set(columns) <= set(names)
        with Rollouts([folder, *BOTH]) as rollouts:
            expected = [facts_of(rollouts.load(number)) for number in range(1, len(rollouts) + 1)]
        for name in ("task", "reward", "turns", "malformed", "termination"):
            assert await page.run(f"cells({names.index(name)})") == [facts[name] for facts in expected], name
        charts = await page.run(
            "[...document.querySelectorAll('.chart svg')].map((chart) => chart.getAttribute('aria-label'))"
        )
        titles = ("Reward", "Sampled tokens", "Mean logprob", "Turns that drift")
        assert [chart.split(":")[0] for chart in charts] == list(titles)
        bars = await page.run("[...document.querySelectorAll('.chart svg')].map(barCounts)")
        assert [sum(chart) for chart in bars] == [len(expected)] * 4, "each rollout is in one bar of each histogram"
        groups = await page.run(
            "[...document.querySelectorAll('.groups tbody tr')]"
            ".map((row) => [...row.cells].slice(0, 3).map((cell) => cell.textContent))"
        )
        assert ["sum-1", "2", "2.5"] in groups
        # An index names tasks and no groups: of rollouts that are not read yet the group is unknown.
        await page.run("window.fetch = () => new Promise(() => {})")
        await page.run("main.replaceChildren(...new CollectionPage(data).element)")
        assert await page.run("document.querySelectorAll('.rollouts tbody tr').length") == len(expected)
        assert await page.run("document.querySelectorAll('.groups tr').length") == 0


async def test_equal_rewards_are_named_once_and_not_as_an_axis(page: Tab) -> None:
    with served(*BOTH) as server:
        await open_page(page, server.url)
        await page.until("!document.querySelector('[role=status]').textContent.includes('reading')")
        assert "Every reward is 0." in await page.run("document.querySelector('.groups .hint').textContent")
        chart = "document.querySelector('.chart')"
        assert await page.run(f"{chart}.querySelector('.ends').textContent") == "all 0"
        assert sum(await page.run(f"barCounts({chart})")) == 6


async def test_a_narrow_window_folds_facts_and_legend_and_keeps_the_tokens_in_view(page: Tab, tmp_path: Path) -> None:
    await page.look(width=390, height=844)
    await open_page(page, filed(tmp_path, REAL / "vllm.tito", numbers=(3,)))
    folded = "[...document.querySelectorAll('.folding')].map((part) => part.open)"
    assert await page.run(folded) == [False, False]
    assert await page.run("document.querySelector('.chunk').getBoundingClientRect().top") < 0.75 * 844
    await page.run("document.querySelector('.tokens').focus()")
    await page.press("j")
    assert await page.run("likeliestIds().length"), "a panel with all that it may hold"
    assert await page.run("document.querySelector('.detail').getBoundingClientRect().height") < 0.25 * 844
    await page.look()
    await page.until(f"{folded}.every(Boolean)")
    assert not await page.run("[...document.querySelectorAll('.folding > summary')].some((one) => one.offsetHeight)")


async def test_a_table_sorts_by_keyboard_alone(page: Tab) -> None:
    with served(*BOTH) as server:
        await open_page(page, server.url)
        await page.until("!document.querySelector('[role=status]').textContent.includes('reading')")
        for _ in range(40):
            await page.press("Tab")
            if await page.run("document.activeElement.dataset.key === 'tokens'"):
                break
        for order in ("descending", "ascending"):
            await page.press("Enter")
            assert await page.run(f"document.querySelector('[aria-sort={order}]').textContent.startsWith('tokens')")
            assert await page.run("document.activeElement.dataset.key") == "tokens", "the focus stays on the heading"


async def test_a_comparison_can_follow_another_branch(page: Tab, tmp_path: Path) -> None:
    path = written(tmp_path, rich(), rich_again())
    await open_page(page, filed(tmp_path, path, numbers=(1, 2)))
    assert "The first 11 tokens are the same" in await page.run("document.querySelector('.shared summary').textContent")
    await page.run(
        "(([choice]) => { choice.selectedIndex = 1; choice.dispatchEvent(new Event('change')); })"
        "(document.querySelectorAll('.leaf select'))"
    )
    assert "The first 8 tokens are the same" in await page.run("document.querySelector('.shared summary').textContent")


def rich_again() -> Ledger:
    first = rich()
    again = Ledger("00000002-0000-4000-8000-000000000000")
    for turn in first:
        again.commit(turn.draft)
    return again


def facts_of(ledger: Ledger) -> dict[str, Any]:
    reward = ledger.annotation("reward")
    malformed = sum(call.status in ("malformed", "truncated") for turn in ledger for call in turn.draft.calls)
    return {
        "task": ledger.header.task_id or "",
        "reward": f"{reward:g}",
        "turns": str(len(ledger)),
        "malformed": str(malformed),
        "termination": ledger.annotation("termination"),
    }
