"""`tito inspect` and `tito verify` on files: summary, tree, coloured tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.table import Table
from rich.text import Text

import strands_tito
from strands_tito.cli import main
from strands_tito.collect.folder import RolloutFolder
from strands_tito.collect.rollout import Rollout, RolloutResult, Task
from strands_tito.inspect.show import Column, FittedTable, coloured, ids_only, ledger_table
from support.drafts import make_draft
from support.typed import tito
from tito_core import store
from tito_core.ledger import CallRecord, Ledger, Provenance
from tito_core.termination import Termination
from tito_engines.terminal import VISIBLE, VisibleConsole, progress_of, visible

UUID = "00000001-0000-4000-8000-000000000000"


def forked(**header: object) -> Ledger:
    ledger = Ledger(UUID, **header)  # type: ignore[arg-type]
    kinds = np.array([Provenance.SCAFFOLD, Provenance.PROMPT], np.uint8)
    ledger.commit(make_draft(None, 0, [100, 101], [200], prompt_provenance=kinds))
    inserted = np.array([Provenance.INSERTED], np.uint8)
    calls = (CallRecord("look", "ok", 0, 1), CallRecord(None, "malformed", 1, 2, "why"))
    ledger.commit(make_draft(0, 3, [102], [201, 202], prompt_provenance=inserted, calls=calls))
    ledger.commit(make_draft(0, 3, [103], [203], constrained=True, reasoning_closed=False))
    return ledger


MEAN = f"{np.concatenate([turn.draft.logprobs for turn in forked()]).mean():.2f}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "rollouts.tito"
    ledger = forked(task_id="task-7")
    ledger.annotate("reward", 0.5)
    store.append(made, [ledger, Ledger("00000002-0000-4000-8000-000000000000")])
    return made


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_tito.cli.console", VisibleConsole(width=160))


def output_of(*arguments: object, status: int = 0) -> str:
    result = tito(*arguments)
    assert result.exit_code == status, result.output
    return result.output


def test_the_summary_has_one_row_per_rollout(path: Path) -> None:
    lines = output_of("inspect", path).splitlines()
    row = next(line.split() for line in lines if "00000001" in line)
    assert row == ["1", "00000001", "task-7", "3", "3", "1", "4", "1", "1", "2", MEAN, "0.5"]
    assert "logprob" in lines[0]
    assert "ended" not in lines[0], "an empty column is left out"
    assert "00000002" in output_of("inspect", path)


def test_markup_in_a_name_is_shown_as_it_is(tmp_path: Path) -> None:
    store.append(tmp_path / "r", [forked(task_id="[/b] [bold]x")])
    assert "[/b] [bold]x" in output_of("inspect", tmp_path / "r")


def test_a_rollout_is_shown_as_a_tree(path: Path) -> None:
    assert output_of("inspect", path, "--rollout", 1).splitlines() == [
        f"ledger {UUID}: 3 turns, 2 trajectories, 8 tokens, 4 of them sampled",
        "└─ turn 0  2+1 tokens  stop",
        "   ├─ turn 1  1+2 tokens  stop  calls look, ? (malformed)",
        "   └─ turn 2  1+1 tokens  stop  reasoning left open  constrained  ← separate agent, from turn 0",
    ]


def test_each_sampled_token_is_shown_once_with_its_logprob(path: Path) -> None:
    rows = [line.split() for line in output_of("inspect", path, "--rollout", 1, "--logprobs").splitlines()[2:]]
    expected = [
        (turn.index, int(token), f"{logprob:.4f}")
        for turn in forked()
        for token, logprob in zip(turn.draft.output_ids, turn.draft.logprobs, strict=True)
    ]
    assert [(int(row[1]), int(row[3]), row[4]) for row in rows] == expected
    assert [int(row[2]) for row in rows] == [2, 4, 5, 4], "offsets in the first trajectory that holds the token"


def test_logprobs_without_a_tokenizer_name_each_id_once(path: Path) -> None:
    header, _, *rows = output_of("inspect", path, "--rollout", 1, "--logprobs").splitlines()[-6:]
    assert header.split() == ["trajectory", "turn", "offset", "id", "logprob", "probability"]
    assert [row.split().count(row.split()[3]) for row in rows] == [1] * 4


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("inspect", "--rollout", 1, "--tokens"), 0),
        (("inspect", "--rollout", 1, "--logprobs"), 0),
        (("export", "--to", "slime", "--out", "out.jsonl"), 1),
    ],
)
def test_a_name_in_a_file_causes_no_network_access(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], status: int
) -> None:
    reached: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        reached.append(address)
        raise OSError("no network here")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("huggingface_hub.utils._detect_agent._registry", None)  # what an earlier request kept
    monkeypatch.chdir(tmp_path)
    store.append(tmp_path / "rollouts.tito", [forked(tokenizer="somebody/private-model-7b")])
    command, *options = arguments
    result = tito(command, "rollouts.tito", *options)
    assert result.exit_code == status, result.output
    shown = f"{result.output} {result.exception}"
    assert "somebody/private-model-7b" in shown
    assert "--tokenizer NAME" in shown
    assert reached == []
    named = [command, "rollouts.tito", *options, "--tokenizer", "somebody/private-model-7b"]
    tito(*named)
    assert reached, "the user's own name may be downloaded"


def test_a_folder_of_collected_rollouts_is_shown_and_verified(tmp_path: Path) -> None:
    with RolloutFolder(tmp_path / "collected", {}) as folder:
        for number in range(3):
            rollout = Rollout(UUID, Task(f"sum-{number}", {}, f"{number:016x}"), 0)
            folder.append(RolloutResult(rollout, one_turn(number), Termination.COMPLETED))
    shown = output_of("inspect", tmp_path / "collected")
    assert all(one_turn(number).uuid[:8] in shown for number in range(3))
    assert "hold on 3 ledgers, 3 turns" in output_of("verify", tmp_path / "collected")


def one_turn(number: int) -> Ledger:
    ledger = Ledger(f"{number + 1:08x}-0000-4000-8000-000000000000")
    ledger.commit(make_draft(None, 0, [100], [200]))
    return ledger


def test_the_version_is_printed() -> None:
    assert output_of("--version").split() == ["strands-tito", strands_tito.__version__]
    assert strands_tito.__version__ == metadata.version("strands-tito")


@settings(max_examples=60)
@given(
    width=st.integers(20, 160),
    columns=st.lists(
        st.tuples(st.text("abcdefgh", min_size=1, max_size=9), st.text("xyz 1", max_size=60), st.booleans()),
        min_size=1, max_size=12,
    ),
)  # fmt: skip
def test_a_table_fits_its_width_and_names_what_it_left_out(width: int, columns: list[tuple[str, str, bool]]) -> None:
    made = [Column(f"{name}{number}", [cell], number, words) for number, (name, cell, words) in enumerate(columns)]
    shown, printed = columns_shown(made, width)
    assert shown == [column.name for column in made[: len(shown)]], "the highest rank goes first"
    assert all(len(line) <= width for line in printed.splitlines())
    flat = " ".join(printed.split())
    assert len(shown) <= 1 or all(column.name in flat for column in made)
    assert shown or width < made[0].min_width, "a column of rank 0 stays"


def columns_shown(columns: Sequence[Column], width: int) -> tuple[list[str], str]:
    """Return the names of a printed table's columns, and the table."""
    console = VisibleConsole(file=StringIO(), width=width)
    console.print(FittedTable(columns))
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    heading = printed.split("\n", 1)[0].split()
    return [column.name for column in columns if column.name in heading], printed


@pytest.mark.parametrize(("width", "left_out"), [(80, ["inserted"]), (110, [])])
def test_the_summary_of_short_values_is_whole_at_common_widths(width: int, left_out: list[str]) -> None:
    columns = ledger_table([forked()]).columns
    shown, _ = columns_shown(columns, width)
    assert [column.name for column in columns if column.name not in shown] == left_out


def test_the_summary_has_the_sum_of_the_latest_rewards_of_turns_and_calls() -> None:
    judged, plain = forked(), forked()
    for value, place in ((9, {"turn": 1}), (0.25, {"turn": 1}), (-1, {"turn": 1, "call": 0}), (None, {"turn": 2})):
        judged.annotate("reward", value, **place)  # type: ignore[arg-type]
    plain.annotate("reward", 2)
    cells = {column.name: column.cells for column in ledger_table([judged, plain]).columns}
    assert (cells["reward"], cells["credit"]) == (["", "2.0"], ["-0.75", ""])
    assert "credit" not in {column.name for column in ledger_table([plain]).columns}


def test_tokens_are_shown_as_ids_without_a_tokenizer(path: Path) -> None:
    shown = output_of("inspect", path, "--rollout", 1, "--tokens")
    assert "trajectory 1 of 2" in shown
    assert "turn 0, tokens 0 to 3\n100 101 200" in shown
    assert "turn 0, tokens 0 to 3, context here" in shown
    assert "103 203" in shown


def test_tokens_are_shown_as_text_with_one(path: Path, folder: str) -> None:
    shown = output_of("inspect", path, "--rollout", 1, "--tokens", "--tokenizer", folder)
    assert "\ntu␌\n" in shown, "the text of tokens 100, 101 and 200, with control characters made visible"
    assert "100 101" not in shown


def test_a_missing_tokenizer_is_an_error_only_if_the_user_named_it(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [forked(tokenizer=str(tmp_path / "gone"))])
    assert "Showing ids" in output_of("inspect", path, "--rollout", 1, "--tokens")
    output_of("inspect", path, "--rollout", 1, "--tokens", "--tokenizer", tmp_path / "gone", status=1)


def test_every_token_has_the_colour_of_its_provenance() -> None:
    shown = StringIO()
    Console(file=shown, width=120, force_terminal=True, color_system="standard").print(coloured(forked(), ids_only))
    styles = {"SCAFFOLD": "90m100", "PROMPT": "36m101", "INSERTED": "30;43m102", "SAMPLED": "32m200"}
    for name, styled in {**styles, "CONSTRAINED": "35m203"}.items():
        assert f"\x1b[{styled}" in shown.getvalue(), name


@pytest.mark.parametrize("arguments", [("--rollout", 3), ("--tokens",), ("--rollout", -1)])
def test_bad_options_are_refused(path: Path, arguments: tuple[object, ...]) -> None:
    assert "Invalid value" in output_of("inspect", path, *arguments, status=2)


def test_verify_checks_every_ledger(path: Path) -> None:
    assert "1 to 4 and 8 to 10 hold on 2 ledgers, 3 turns" in output_of("verify", path)


def test_the_bytes_of_a_file_that_ends_inside_a_record_are_named(path: Path) -> None:
    whole = path.read_bytes()
    for command in ("inspect", "verify"):
        assert "skipped" not in output_of(command, path)
    path.write_bytes(whole[: len(whole) * 6 // 10])
    with store.LedgerFile(path) as file:
        said = f"ends inside a record: its last {file.torn_bytes:,} bytes, from byte {file.end:,} on, were skipped"
    assert said in output_of("inspect", path)
    shown = output_of("verify", path, status=1)
    assert said in shown
    assert "hold on 1 ledger" in shown


def test_what_a_folder_holds_besides_its_finished_rollouts_is_named(tmp_path: Path) -> None:
    with RolloutFolder(tmp_path / "c", {}) as folder:
        for number in range(2):
            rollout = Rollout(UUID, Task(f"sum-{number}", {}, f"{number:016x}"), 0)
            folder.append(RolloutResult(rollout, one_turn(number), Termination.COMPLETED))
    file = tmp_path / "c" / "rollouts-00001.tito"
    store.append(file, [one_turn(7)])
    with file.open("ab") as opened:
        opened.write(b"\x20\0\0")
    shown = output_of("verify", tmp_path / "c")
    assert "hold on 2 ledgers" in shown
    assert "its last 3 bytes" in shown
    assert f"1 ledger (the first is {one_turn(7).uuid}) without an END record" in shown
    (tmp_path / "c" / "rollouts-00002.tito").write_bytes(file.read_bytes()[:8])
    assert "its last 3 bytes" in output_of("verify", tmp_path / "c", status=1), "no crash cuts a full file"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(is_terminal: bool) -> None:
    console = VisibleConsole(file=StringIO(), force_terminal=is_terminal, width=80)
    assert list(progress_of(iter("abc"), "checking", 3, console)) == ["a", "b", "c"]
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("checking" in shown and "100%" in shown) if is_terminal else shown == ""


def test_verify_counts_the_streamed_turns_whose_order_nothing_showed(tmp_path: Path) -> None:
    assert "streamed" not in output_of("verify", _stored(tmp_path / "shown.tito", unordered=False))
    shown = output_of("verify", _stored(tmp_path / "not-shown.tito", unordered=True))
    assert "streamed    1 turn, 2 sampled tokens: nothing in the events showed their order" in shown


def _stored(path: Path, *, unordered: bool) -> Path:
    ledger = Ledger("00000003-0000-4000-8000-000000000000")
    draft = make_draft(None, 0, [101], [201, 202])
    ledger.commit(replace(draft, engine=replace(draft.engine, unordered=unordered)))
    ledger.commit(make_draft(0, 3, [102], [203]))
    store.append(path, [ledger])
    return path


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b[31m[/red]\x9b31m\r\x7f"


def expect_no_control(shown: str) -> None:
    assert not {character for character in shown if ord(character) in VISIBLE} - {"\n", "\t"}


@pytest.mark.parametrize("more", [(), ("--rollout", "1"), ("--rollout", "1", "--tokens")], ids=len)
def test_control_characters_of_a_file_are_shown_and_not_sent_to_the_terminal(tmp_path: Path, more: tuple[str]) -> None:
    path = tmp_path / "hostile.tito"
    ledger = forked(task_id=HOSTILE, tokenizer=HOSTILE)
    ledger.commit(make_draft(0, 3, [104], [205], calls=(CallRecord(HOSTILE, "ok", 0, 1),)))
    ledger.annotate("termination", HOSTILE)
    store.append(path, [ledger])
    shown = output_of("inspect", path, *more)
    expect_no_control(shown)
    assert more or "␛[31m[/red]" in shown


def test_control_characters_of_an_error_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "hostile \x1b[31m.tito"
    path.write_text("none")
    monkeypatch.setattr("sys.argv", ["tito", "inspect", str(path)])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    shown = capsys.readouterr().err
    expect_no_control(shown)
    assert "hostile ␛[31m.tito" in shown


@settings(max_examples=40)
@given(text=st.text(), width=st.integers(1, 30))
def test_a_console_prints_no_control_character_of_a_text(text: str, width: int) -> None:
    console = VisibleConsole(file=StringIO(), width=width, force_terminal=False)
    for shown in (text, Text(text, "bold red")):
        console.print(shown, markup=False)
    table = Table(text)
    table.add_row(Text(text))
    console.print(table)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert not {character for character in printed if ord(character) in VISIBLE} - {"\n"}
    assert visible(visible(text)) == visible(text)


def test_a_console_keeps_its_own_colours() -> None:
    console = VisibleConsole(file=StringIO(), width=30, force_terminal=True, color_system="standard")
    console.print(Text("\x1b[31m", "green"), end="")
    assert console.file.getvalue() == "\x1b[32m␛[31m\x1b[0m"  # type: ignore[attr-defined]
