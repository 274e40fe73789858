"""Files and folders of rollouts: numbering, lazy reading, growth."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from strands_tito.collect.folder import RolloutFolder
from strands_tito.collect.rollout import Rollout, RolloutResult, Task
from strands_tito.viewer.data import Pictures, TokenTexts
from strands_tito.viewer.rollouts import INDEXED, READ, Rollouts, read_rows
from strands_tito.viewer.site import Site
from support.drafts import make_draft
from support.growth import expect_linear
from support.made_up import add_ends
from support.scripted import tokenizer
from support.shown import Texts, data_of, ledger_of_calls, real, rich, written
from tito_core import store
from tito_core.ledger import Annotation, Ledger
from tito_core.store import LedgerFile, SchemaError
from tito_core.termination import Termination


def ledger_of(reward: float = 0.5, task: str = "sum-1") -> Ledger:
    ledger = Ledger(task_id=task)
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.annotate("reward", reward)
    ledger.annotate("termination", "completed")
    return ledger


def collected(folder: Path, count: int) -> Path:
    run = str(uuid.uuid4())
    with RolloutFolder(folder, {}) as opened:
        for number in range(count):
            task = Task(f"sum-{number // 2}", {}, f"{number // 2:016x}")
            rollout = Rollout(run, task, number % 2)
            opened.append(RolloutResult(rollout, ledger_of(float(number), task.id), Termination.COMPLETED))
    return folder


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ledgers that were read, in order."""
    names: list[str] = []
    load = LedgerFile.load

    def counted(self: LedgerFile, name: str, **options: Any) -> Ledger:
        names.append(name)
        return load(self, name, **options)

    monkeypatch.setattr(LedgerFile, "load", counted)
    return names


def rows(page: bytes) -> list[dict[str, Any]]:
    data = data_of(page)
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def site(rollouts: Rollouts) -> Site:
    return Site(rollouts, TokenTexts(), Pictures(), home="/home/")


def test_a_table_reads_no_ledger_and_a_page_reads_one(tmp_path: Path, loads: list[str]) -> None:
    pages = site(Rollouts([collected(tmp_path / "c", 6), written(tmp_path, *(ledger_of() for _ in range(5)))]))
    table = rows(pages.collection())
    assert loads == []
    assert [row["number"] for row in table] == list(range(1, 12))
    assert [row["reward"] for row in table[:6]] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "from the END records"
    assert table[6]["reward"] is None, "not known before the ledger is read"
    shown = data_of(pages.rollout(8))
    assert loads == [shown["uuid"]] == [table[7]["ledger"]]


def test_ledgers_are_read_in_steps(tmp_path: Path, loads: list[str]) -> None:
    rollouts = Rollouts([written(tmp_path, *(ledger_of() for _ in range(5)))])
    assert len(read_rows(rollouts, 1, TokenTexts(), lambda: len(loads) >= 3)) == 3
    assert loads == [rollouts.place(number).ledger for number in (2, 3, 4)]
    assert read_rows(rollouts, 5, TokenTexts(), lambda: False) == []


def test_a_row_holds_the_facts_of_its_ledger() -> None:
    rollouts = real("sglang")
    found = [dict(zip(READ, row, strict=True)) for row in read_rows(rollouts, 0, Texts(tokenizer()), lambda: False)]
    assert [row["malformed"] for row in found] == [0, 1, 1]
    assert {row["backend"] for row in found} == {"sglang"}
    for number, row in enumerate(found, 1):
        ledger = rollouts.load(number)
        assert row["sampled"] == sum(len(turn.draft.output_ids) for turn in ledger)
        every = [float(value) for turn in ledger for value in turn.draft.logprobs]
        assert row["logprob"] == pytest.approx(sum(every) / len(every))
        assert 0 <= row["drift"] <= 1
    assert set(READ) <= {*INDEXED, "malformed", "logprob", "drift", "backend", "agents"}


def test_calls_that_ran_and_texts_like_calls_are_not_counted_as_malformed(tmp_path: Path) -> None:
    rows = read_rows(Rollouts([written(tmp_path, ledger_of_calls())]), 0, TokenTexts(), lambda: False)
    assert rows[0][READ.index("malformed")] == 2


def test_an_empty_ledger_and_odd_annotations_have_rows(tmp_path: Path) -> None:
    odd = ledger_of()
    notes = [Annotation("reward", {"a": 1}), Annotation("termination", 7)]  # rewards were not checked before
    odd = Ledger.load(odd.header, [turn.draft for turn in odd], notes)
    found = read_rows(Rollouts([written(tmp_path, Ledger(), odd)]), 0, TokenTexts(), lambda: False)
    empty, second = (dict(zip(READ, row, strict=True)) for row in found)
    assert (empty["turns"], empty["logprob"], empty["reward"]) == (0, None, None)
    assert (second["reward"], second["termination"]) == ("{'a': 1}", "7")


def test_later_rollouts_get_the_next_numbers_and_later_rewards_are_shown(tmp_path: Path) -> None:
    folder, file = collected(tmp_path / "c", 2), written(tmp_path, ledger_of())
    rollouts = Rollouts([folder, collected(tmp_path / "unchanged", 1), file])
    first = [rollouts.place(number).ledger for number in (1, 2, 3, 4)]
    late, judged = ledger_of(), rollouts.load(1)
    store.append(file, [late])
    judged.annotate("reward", 17.0)
    store.append(folder / "rollouts-00001.tito", [judged])
    table = rows(site(rollouts).collection())
    assert [rollouts.place(number).ledger for number in (1, 2, 3, 4, 5)] == [*first, late.uuid]
    assert [(row["ledger"], row["reward"]) for row in table[:2]] == [(first[0], 17.0), (first[1], 1.0)]


def test_a_path_without_rollouts_and_an_unknown_number_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("none")
    with pytest.raises(SchemaError, match="text"):
        Rollouts([tmp_path / "text"])
    with pytest.raises(SchemaError, match=r"collection\.json"):
        Rollouts([tmp_path])
    rollouts = real("vllm")
    for number in (0, -1, 4):
        with pytest.raises(IndexError, match="3 rollouts"):
            rollouts.load(number)


def test_two_rollouts_of_two_engines_are_one_page() -> None:
    both = Rollouts([real("vllm").place(1).file, real("sglang").place(1).file])
    data = data_of(Site(both, Texts(tokenizer()), Pictures()).comparison(1, 4))
    backends = [dict(side["turns"][0]["record"])["backend"] for side in data["sides"]]
    assert backends == ["vllm", "sglang"]


def test_images_are_found_by_the_digest_of_their_bytes(tmp_path: Path) -> None:
    from hashlib import sha256

    from tito_core.ledger import MediaSpan

    folder = tmp_path / "pictures" / "deep"
    folder.mkdir(parents=True)
    contents = {"a": b"\x89PNG\r\n\x1a\n1", "b": b"RIFF0000WEBPx", "c": b"<svg onload=alert(1)>", "d": b"GIF89a!"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    ledger = Ledger()
    spans = tuple(MediaSpan(at, 1, sha256(content).digest()) for at, content in enumerate(contents.values()))
    ledger.commit(make_draft(None, 0, [1, 2, 3, 4, 5], [6], media=(*spans, MediaSpan(4, 1, bytes(32)))))
    found = Pictures(tmp_path / "pictures").urls(ledger)
    assert {digest: url.split(";")[0] for digest, url in found.items()} == {
        spans[0].sha256: "data:image/png",
        spans[1].sha256: "data:image/webp",
        spans[3].sha256: "data:image/gif",
    }, "other files are left out: an SVG may hold a script"
    assert Pictures().urls(rich()) == {}


def test_time_to_list_a_folder_is_linear_with_its_rollouts(tmp_path: Path) -> None:
    for count in (1, 4):
        add_ends(collected(tmp_path / str(count), 1), 2_500 * count)
    expect_linear(lambda count: site(Rollouts([tmp_path / str(count)])).collection())
    assert len(data_of(site(Rollouts([tmp_path / "4"])).collection())["rows"]) == 10_000


def test_warm_loads_the_first_rollouts_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer().save_pretrained(folder)
    ledger = Ledger(tokenizer=str(folder))
    ledger.commit(make_draft(None, 0, [100], [200]))
    texts = TokenTexts()
    pages = Site(Rollouts([written(tmp_path, ledger)]), texts, Pictures(), home="/home/")
    pages.warm()
    until = time.monotonic() + 60
    while str(folder) not in texts._loaded and time.monotonic() < until:
        time.sleep(0.01)
    assert texts._loaded[str(folder)] is not None
    Site(Rollouts([written(tmp_path, name="empty.tito")]), texts, Pictures(), home="/home/").warm()
