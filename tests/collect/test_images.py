"""`tito collect` with pictures, as a user types it: it is resumed, verified, inspected and exported with them."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from strands_tito import cli
from strands_tito.collect import collected, entries
from strands_tito.export.parquet import samples_in
from support.collect_command import HERE, command, expect_collected
from support.scripted import call, ids_of, tokenizer
from support.seeing import NAME, PAD, shape
from support.typed import tito
from tito_conformance.testing import Completion, HashPolicy, ScriptedRequest, ScriptedServer, scripted_server
from tito_conformance.testing.pictures import picture
from tito_core.ledger import Ledger

TASKS = 4
WANTED = {(f"line-{line}", sample) for line in range(1, TASKS + 1) for sample in range(2)}  # two of each task
CALL = ids_of(call("look", "{}"), NAME)


def served() -> ScriptedServer:
    """Return a server that reads pictures. By what it sees, its policy calls the tool, or samples a placeholder."""
    qwen = tokenizer(NAME)
    hashed = HashPolicy(len(qwen), alphabet=range(1000, 2000), eos_ids=[qwen.eos_token_id])

    def answers(request: ScriptedRequest) -> Completion:
        if request.measures or request.scoring:
            return hashed(request)
        seen = random.Random(repr(request.images))
        return Completion(
            [*seen.sample(range(1000, 2000), 5), *seen.choice([CALL, CALL, [PAD], []]), qwen.eos_token_id]
        )

    answers.score, answers.top = hashed.score, hashed.top  # type: ignore[attr-defined]
    return scripted_server("sglang", answers, **shape())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("of") / "tokenizer"
    tokenizer(NAME).save_pretrained(path)
    return str(path)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": "?", "number": number}) + "\n" for number in range(TASKS)))
    return path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "console", Console(width=200))


def expect_pictures(ledger: Ledger) -> int:
    """Each picture is the task's, in the prompt first and then once for each call; return their number."""
    number = int(ledger.header.task_id.removeprefix("line-")) - 1  # type: ignore[union-attr]
    first, again = picture(number), picture(100 + number, 96, 64)
    [path] = ledger.trajectories()
    assert [image.data for image in path.images] == [first] + [again] * (len(path.images) - 1)
    assert [span.length for span in path.media] == [4] + [6] * (len(path.media) - 1)
    assert {image.data for image in ledger.images.values()} <= {first, again}
    return len(path.images)


def test_pictures_are_collected_resumed_verified_inspected_and_exported(
    tasks: Path, folder: str, tmp_path: Path, here: None
) -> None:
    out = tmp_path / "out"
    with served() as server:
        half = tmp_path / "half.jsonl"
        half.write_text("".join(tasks.read_text().splitlines(keepends=True)[: TASKS // 2]))
        more = ("-n", "2", "--agent", "collect_agents:looking")
        first = tito(*command("sglang", server, folder, half, out, *more))
        assert first.exit_code == 0, first.output
        early = [ledger.uuid for ledger in collected(out)]
        half.write_text(tasks.read_text())
        second = tito(*command("sglang", server, folder, half, out, *more))
        assert second.exit_code == 0, second.output
        assert f"{2 * TASKS} of {2 * TASKS} rollouts are finished, {len(early)} of them by an earlier run" in (
            second.stderr
        )
        expect_collected(out, server, WANTED)
        ledgers = list(collected(out))
        assert [ledger.uuid for ledger in ledgers[: len(early)]] == early
        counts = list(map(expect_pictures, ledgers))
        assert [entry.reward for entry in entries(out)] == counts
        strays = [(turn.draft.output_ids == PAD).any() for ledger in ledgers for turn in ledger]
        assert max(counts) > 1, "some call the tool"
        assert any(strays), "and some sample a placeholder"
        file = str(out / "rollouts-00001.tito")
        url = ["--backend", "sglang", "--base-url", server.base_url]
        verified = tito("verify", file, *url)
        assert verified.exit_code == 0, verified.output
        assert f"hold on {2 * TASKS} ledgers" in verified.output
        assert "max 0.0e+00" in verified.output
        left_out = re.search(r"(\d+) not comparable", verified.output)
        assert left_out is not None, verified.output
        assert int(left_out[1]) >= sum(strays), "the tokens of rollouts with a sampled placeholder"
    shown = tito("inspect", file)
    assert shown.exit_code == 0, shown.output
    parquet = tmp_path / "rollouts.parquet"
    exported = tito("export", file, "--to", "parquet", "--out", str(parquet))
    assert exported.exit_code == 0, exported.output
    samples = samples_in(pq.read_table(parquet))
    assert [[each.image.data for each in sample.images] for sample in samples] == [
        [image.data for image in ledger.trajectories()[0].images] for ledger in ledgers
    ]
