"""`tito export`: rollouts as files of each format, against the exporters that a trainer calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from strands_tito.collect import RolloutFolder
from strands_tito.export import LogprobMismatchError, sample_of, samples_of, trained_tokens
from strands_tito.export.files import FORMATS, ExportOptions, write
from strands_tito.export.parquet import read_parquet
from strands_tito.export.slime import fan_out
from strands_tito.integrations.trl import columns_of
from support.kept_sets import VOCABULARY, truncated
from support.rollout_forests import HOT, chain, grow, rollouts
from support.scripted import tokenizer
from support.slime_facts import CONTRACT, Recorded
from support.typed import tito
from tito_core import store
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile

AS_RECORDED = ExportOptions(lambda _: text_of, logprobs="as-recorded")
LAST = replace(AS_RECORDED, branches="last")


def text_of(ids: Any) -> str:
    return " ".join(map(str, ids))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def as_json(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rollouts())
def test_every_format_has_what_its_exporter_gives(tmp_path: Path, ledger: Ledger) -> None:
    path, ledgers = tmp_path / "out", [Ledger(), ledger]
    assert write(ledgers, "parquet", path, AS_RECORDED).rows == len(ledger.leaves())
    assert trained_tokens(read_parquet(path)) == trained_tokens(samples_of(ledger))

    write(ledgers, "slime", path, AS_RECORDED)
    expected = fan_out(Recorded(index=0), ledger, decode=text_of, temperature=1.0, logprobs="as-recorded")
    for number, (row, sample) in enumerate(zip(lines(path), expected, strict=True)):
        assert set(row) <= set(CONTRACT["fields"])
        assert (row.pop("index"), row.pop("rollout_id")) == (number, 0)
        assert row.pop("status") == sample.status.value
        assert row.pop("group_index") == (None if ledger.header.group_id is None else 0)
        if sample.reward is None:
            assert (row.pop("reward"), row.pop("remove_sample")) == (0.0, True), "slime's conversion fails on null"
        assert row == {name: as_json(getattr(sample, name)) for name in row}

    write(ledgers, "trl", path, LAST)
    columns = columns_of([ledger], temperature=1.0, end_id=0, branches="last", logprobs="as-recorded")
    assert lines(path) == [{name: column[0] for name, column in columns.items()}]

    write(ledgers, "verl", path, LAST)
    (row,) = lines(path)
    assert row["prompt_ids"] == columns["prompt_ids"][0]
    assert row["response_ids"] == columns["completion_ids"][0]
    untrained = sample_of(ledger, branches="last").total is None
    assert row["response_mask"] == [0 if untrained else each for each in columns["env_mask"][0]]
    assert row["response_logprobs"] == columns["logprobs"][0]


@pytest.mark.parametrize("to", ["slime", "verl", "trl"])
def test_a_rollout_that_is_refused_leaves_the_file_as_it_was(to: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    with pytest.raises(LogprobMismatchError):
        write([chain((2, 2)), chain((2, 2), semantics=HOT)], to, path, ExportOptions(lambda _: text_of))
    assert [path.read_text(), *tmp_path.iterdir()] == ["before", path]


def linked(path: Path, way: str) -> Path:
    other = path.with_name("other")
    {
        "itself": lambda: path.rename(other),
        "link": lambda: other.symlink_to(path),
        "hard link": lambda: other.hardlink_to(path),
    }[way]()
    return other


@pytest.mark.parametrize("way", ["itself", "link", "hard link"])
@pytest.mark.parametrize("to", FORMATS)
def test_recorded_rollouts_are_not_replaced(to: str, way: str, tmp_path: Path) -> None:
    store.append(tmp_path / "rollouts.tito", [chain((2, 2))])
    path = linked(tmp_path / "rollouts.tito", way)
    before = path.read_bytes()
    with LedgerFile(path) as ledgers, pytest.raises(FileExistsError, match="other holds recorded rollouts"):
        write(ledgers, to, path, AS_RECORDED)
    assert path.read_bytes() == before
    RolloutFolder(tmp_path / "folder", {}).close()
    with LedgerFile(path) as ledgers, pytest.raises(FileExistsError, match="holds recorded rollouts"):
        write(ledgers, to, tmp_path / "folder" / "collection.json", AS_RECORDED)
    with LedgerFile(path) as ledgers:
        write(ledgers, to, tmp_path / "out", AS_RECORDED)
    assert path.read_bytes() == before


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("target", ["older", None])
def test_a_link_stays_and_its_file_is_replaced(to: str, target: str | None, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    whole, link = tmp_path / "folder" / "out", tmp_path / "link"
    if target:
        whole.write_text(target)
    link.symlink_to(whole)
    ledgers = [chain((2, 2))]
    write(ledgers, to, link, AS_RECORDED)
    assert link.is_symlink()
    assert [*(tmp_path / "folder").iterdir()] == [whole]
    write(ledgers, to, tmp_path / "plain", AS_RECORDED)
    assert link.read_bytes() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("to", FORMATS)
def test_a_pipe_gets_the_rows(to: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write([chain((2, 2))], to, pipe, AS_RECORDED)
    reader.join()
    assert pipe.is_fifo()
    (tmp_path / "read").write_bytes(read[0])
    assert len(list(read_parquet(tmp_path / "read"))) == 1 if to == "parquet" else len(lines(tmp_path / "read")) == 1


@pytest.mark.parametrize(("appends", "name"), [(True, "stdout"), (False, "-")])
def test_standard_output_has_the_rows_alone(appends: bool, name: str, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "stdout"
    out.symlink_to("/proc/self/fd/1")  # as /dev/stdout is, which a defect would replace for the whole machine
    out = Path("-") if name == "-" else out
    command = [sys.executable, "-m", "strands_tito", "export", path, "--to", "trl", "--out", out]
    (tmp_path / "rows").write_text("{}\n")
    with (tmp_path / "rows").open("ab" if appends else "wb") as rows:
        done = subprocess.run(command, stdout=rows, stderr=subprocess.PIPE, text=True, check=True, cwd=tmp_path)
    assert f"Wrote 1 row of 2 rollouts to {'/dev/stdout' if name == '-' else out}." in done.stderr
    assert (tmp_path / "stdout").is_symlink()
    assert not (tmp_path / "-").exists()
    assert len(lines(tmp_path / "rows")) == 1 + appends


def ran(*words: object) -> tuple[int, str]:
    result = tito("export", *words)
    return result.exit_code, result.output


@pytest.fixture
def path(folder: str, tmp_path: Path) -> Path:
    ledger = Ledger(tokenizer=folder)
    for draft in (turn.draft for turn in chain((3, 2), (1, 2))):
        ledger.commit(draft)
    store.append(tmp_path / "rollouts.tito", [ledger, Ledger()])
    return tmp_path / "rollouts.tito"


def test_the_text_is_that_of_the_rollouts_own_tokenizer(path: Path, tmp_path: Path) -> None:
    ran(path, "--to", "slime", "--out", tmp_path / "out")
    (row,) = lines(tmp_path / "out")
    assert row["response"] == tokenizer().decode(row["tokens"][-row["response_length"] :])


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--to", "ppo"], ["'ppo'", *FORMATS]),
        (["--to", "trl", "--logprobs", "all"], ["'all'", "checked", "as-recorded", "omit"]),
        (["--to", "trl", "--branches", "all"], ["'all'", "list", "last", "error"]),
        (["--to", "parquet", "--branches", "last"], ["parquet", "each path as it was recorded", "branches='last'"]),
        (["--to", "parquet", "--logprobs", "omit"], ["parquet", "logprobs='omit'"]),
        (["--to", "parquet", "--temperature", "0.5"], ["parquet", "temperature=0.5"]),
        (["--to", "slime", "--branches", "error"], ["slime", "a row for each path", "branches='error'"]),
        (["--to", "trl", "--replays"], ["trl", "kept sets", "replays=True"]),
        (["--to", "trl", "--temperature", "0.5"], ["LogprobMismatchError", "0.5"]),
        (["--to", "slime", "--tokenizer", "./gone"], ["TokenizerError", "./gone"]),
    ],
)
def test_a_wrong_option_is_an_error_with_its_value(words: list[str], values: list[str], path: Path) -> None:
    result = tito("export", path, "--out", path.with_name("out"), *words)
    shown = " ".join(f"{result.output} {result.exception!r}".split())
    assert result.exit_code != 0
    assert [value for value in values if value not in shown] == []
    assert not path.with_name("out").exists()


def test_kept_sets_are_written_for_a_slime_that_replays_them(path: Path) -> None:
    out, asked = path.with_name("out"), ("--to", "slime", "--tokenizer", tokenizer().name_or_path)
    status, shown = ran(path, *asked, "--replays", "--out", out)
    assert (status, "trained tokens" in shown, "have no kept set" in shown) == (1, True, True), shown
    path.unlink()
    store.append(path, [truncated(7, 2, top=VOCABULARY, mask=True, top_p=0.7)])
    status, shown = ran(path, *asked, "--out", out)
    assert (status, "slime has no place for kept sets, or does not replay them" in shown) == (1, True), shown
    status, shown = ran(path, *asked, "--replays", "--out", out)
    assert status == 0, shown
    assert lines(out)[-1]["rollout_top_p_token_ids"]


def test_a_branched_rollout_has_a_row_a_path_or_its_last_path_or_is_refused(path: Path) -> None:
    branched = chain((2, 2), (1, 1))
    grow(branched, 0, 1, 1)
    store.append(path, [branched])
    out = path.with_name("out")
    for to in ("verl", "trl"):
        assert ran(path, "--to", to, "--missing-reward", "1", "--out", out) == (
            0,
            f"Wrote 3 rows of 3 rollouts to {out}. 8 of 8 sampled tokens are trained.\n"
            "Rollouts: 1 without turns (no row), 2 without a reward.\n",
        )
    assert [row["rollout_trajectory"] for row in lines(out)] == [0, 0, 1]
    status, shown = ran(path, "--to", "trl", "--branches", "error", "--out", out)
    assert (status, "BranchedRolloutError" in shown, "--branches" in shown or "branches='last'" in shown) == (
        1,
        True,
        True,
    )
    assert ran(path, "--to", "trl", "--branches", "last", "--out", path.with_name("out"))[0] == 0
