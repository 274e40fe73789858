"""Ledgers in files: whole records survive, torn ones are skipped, newer ones are refused."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.drafts import engine_record, make_draft
from tito_core import store
from tito_core.ledger import CallRecord, Ledger, Sampling, VersionSpan
from tito_core.store import SchemaError, from_record, to_record
from tito_core.store.frames import BLOCK, HEAD_BYTES, MAGIC, PREAMBLE, frames


def two_ledgers(path: Path) -> bytes:
    path.unlink(missing_ok=True)
    store.append(path, [ledger(1), ledger(2)])
    return path.read_bytes()


def ledger(number: int) -> Ledger:
    made = Ledger(f"{number:08d}-0000-4000-8000-000000000000")
    made.commit(make_draft(None, 0, [100, 101], [200 + number]))
    made.commit(make_draft(0, 3, [102], [203, 204]))
    return made


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_cut_at_any_byte_keeps_whole_records_and_can_be_appended_to(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "rollouts.tito"
    path.unlink(missing_ok=True)
    whole_at: list[tuple[int, str, int]] = []  # bytes, ledger and its number of turns
    with store.LedgerFile(path, "a") as file:
        for number in range(3):
            made = file.attach(Ledger(ledger(number).uuid))
            for turn in ledger(number):
                made.commit(turn.draft)
                whole_at.append((path.stat().st_size, made.uuid, len(made)))
    cut = data.draw(st.integers(0, path.stat().st_size))
    path.write_bytes(path.read_bytes()[:cut])
    expected = {uuid: turns for end, uuid, turns in whole_at if end <= cut}
    if cut >= len(PREAMBLE):
        loaded = {made.uuid: len(made) for made in store.read(path)}
        assert {uuid: turns for uuid, turns in loaded.items() if turns} == expected
        assert set(loaded) >= set(expected)
    store.append(path, [ledger(0), ledger(9)])
    assert {made.uuid: len(made) for made in store.read(path) if len(made)} == {
        **expected,
        ledger(0).uuid: 2,
        ledger(9).uuid: 2,
    }


def test_only_a_torn_tail_is_dropped(tmp_path: Path) -> None:
    """Cut at each byte of the heads, between head and payload, in payloads and between records; with zeros after it."""
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    synced = path.stat().st_size
    with store.LedgerFile(path, "a") as file:
        made = file.attach(ledger(2))
        made.annotate("reward", 1.0)
    whole = path.read_bytes()
    records = [frame.offset - HEAD_BYTES for frame in frames(io.BytesIO(whole), len(PREAMBLE), path)]
    heads = {record + byte for record in records for byte in range(-1, HEAD_BYTES + 2)}
    for cut in sorted({*heads, *range(synced, len(whole), 9)} & {*range(synced, len(whole))}):
        path.write_bytes(whole[:cut] + bytes([0, 3, 5000][cut % 3]))
        assert store.encode(store.read(path)[0]) == store.encode(ledger(1))
        with store.LedgerFile(path, "a") as file:
            file.attach(made)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("gone", ["closed", "removed", "replaced"])
def test_what_would_be_lost_is_not_written(gone: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    file = store.LedgerFile(path, "a")
    made = file.attach(ledger(1))
    turns = len(made)
    if gone == "closed":
        file.close()
    else:
        path.unlink()
    if gone == "replaced":
        store.append(path, [ledger(2)])
    for use in (file.sync, file.check_open, lambda: made.annotate("reward", 1.0), lambda: file.append(ledger(3))):
        with pytest.raises(OSError, match=f"the file was {'closed' if gone == 'closed' else 'removed'}") as caught:
            use()
        assert caught.value.filename == str(path)
    assert (len(made), made.annotations) == (turns, ())
    file.close()


def test_a_file_opened_to_read_takes_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    with store.LedgerFile(path) as file:
        (made,) = file
        with pytest.raises(OSError, match="opened to read only, open it with mode 'a'"):
            file.attach(made)
    made.annotate("reward", 1.0)  # it streams nowhere


@pytest.mark.parametrize("how", ["emptied", "cut", "another file", "older copy and another writer"])
def test_a_file_that_another_program_shortened_takes_no_more_records(how: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    older = path.read_bytes()
    with store.LedgerFile(path, "a") as file, store.LedgerFile(path) as reader:
        made = file.attach(ledger(2))
        assert len(reader) == 2
        whole = path.read_bytes()
        os.truncate(path, {"emptied": 0, "cut": len(whole) - 5}.get(how, len(older)))  # the same file, not a new one
        if how == "another file":
            path.write_bytes(bytes(len(whole)))
        elif how.startswith("older"):
            store.append(path, [ledger(3), ledger(4)])
        changed = path.read_bytes()
        for use in (file.check_open, lambda: made.annotate("reward", 1.0), lambda: file.append(ledger(5))):
            with pytest.raises(OSError, match=f"truncated it or wrote over it: it has {len(changed)} bytes"):
                use()
        with pytest.raises(SchemaError, match="changed while it was open"):
            reader.load(ledger(2).uuid)
        assert (made.annotations, path.read_bytes()) == ((), changed), "nothing is filled with zeros"
        path.write_bytes(whole)
        made.annotate("reward", 1.0)  # restored from a copy
    assert [len(each.annotations) for each in store.read(path)] == [0, 1]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_lost_bytes_in_its_middle_is_damaged(tmp_path: Path, data: st.DataObject) -> None:
    """What cannot be a torn tail is damage: a whole record follows the missing bytes."""
    path = tmp_path / "rollouts.tito"
    whole = two_ledgers(path)
    starts = [frame.offset - HEAD_BYTES for frame in frames(io.BytesIO(whole), len(PREAMBLE), path)]
    start = data.draw(st.integers(len(PREAMBLE), starts[-1] - 1))
    stop = data.draw(st.integers(start + 1, starts[-1]))
    assume(not {start, stop} <= {*starts})  # whole records are missing: the ledger's own checks find it
    path.write_bytes(whole[:start] + whole[stop:])
    with pytest.raises(SchemaError, match=r"damaged|unknown kind"):
        store.read(path)


class Growing(io.BytesIO):
    """A file to which another process appends the rest of a record, and one more, at one of the reads."""

    def __init__(self, whole: bytes, size: int, at: int) -> None:
        super().__init__(whole[:size])
        self._whole, self._at = whole, at

    def readinto(self, view: Any) -> int:
        if not self._at:
            place = self.tell()
            super().write(self._whole[self.seek(0, os.SEEK_END) :])
            self.seek(place)
        self._at -= 1
        return super().readinto(view)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_that_grows_while_it_is_read_is_not_damaged(tmp_path: Path, data: st.DataObject) -> None:
    """A reader of a running collection met half a record, and then one behind it."""
    path = tmp_path / "rollouts.tito"
    whole = two_ledgers(path)
    expected = [*frames(io.BytesIO(whole), len(PREAMBLE), "rollouts.tito")]
    size, at = data.draw(st.integers(len(PREAMBLE), len(whole))), data.draw(st.integers(0, 4))
    found = [*frames(Growing(whole, size, at), len(PREAMBLE), "rollouts.tito")]
    assert found == [frame for frame in expected if frame.offset + frame.length <= size]


@pytest.mark.parametrize("tail", [b"# a line of text\n", b"\x10\0\0\0abcd\x09", bytes(28) + b"\x01"])
def test_an_end_that_no_writer_began_is_damage(tail: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    whole = path.read_bytes() + tail
    path.write_bytes(whole)
    for use in (lambda: store.read(path), lambda: store.append(path, [ledger(2)])):
        with pytest.raises(SchemaError, match="is damaged"):
            use()
    assert path.read_bytes() == whole


def test_the_bytes_of_a_torn_tail_are_counted_and_its_cut_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    with store.LedgerFile(path) as file:
        assert (file.torn_bytes, file.end) == (0, path.stat().st_size)
        os.truncate(path, path.stat().st_size - 7)
    with store.LedgerFile(path) as file:
        torn = path.stat().st_size - file.end
        assert file.torn_bytes == torn > 0
    store.append(path, [ledger(2)])
    (line,) = [each.getMessage() for each in caplog.records]
    assert f"bytes=<{torn}>" in line
    with store.LedgerFile(path) as file:
        assert file.torn_bytes == 0


def test_forked_processes_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    script = f"""
import os
import subprocess
import sys
from support import crash_writer
from tito_core.ledger import Ledger
from tito_core.store import LedgerFile
with LedgerFile({str(path)!r}, "a") as file:
    children = []
    for number in range(4):
        children.append(os.fork())
        if not children[-1]:
            try:
                made = file.attach(Ledger(f"{{number:08d}}-0000-4000-8000-000000000000"))
                for _ in range(40):
                    crash_writer.commit_next(made)
                os._exit(0)
            finally:
                os._exit(1)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
"""
    python_path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": python_path})
    assert [len(each) for each in store.read(path)] == [40] * 4


def test_readers_that_were_forked_do_not_move_each_other(tmp_path: Path) -> None:
    """Forked processes share the position of a file that was open before."""
    path = tmp_path / "rollouts.tito"
    with store.LedgerFile(path, "a") as file:
        made = file.attach(Ledger(ledger(1).uuid))
        for turn in range(40):
            made.commit(make_draft(turn - 1 if turn else None, 1001 * turn, [100], [200] * 1000))
    data, found = path.read_bytes(), []
    assert len(data) > 2 * BLOCK, "it is read in several blocks"
    with io.FileIO(path) as shared:
        for frame in frames(shared, len(PREAMBLE), path):
            found.append(frame)
            os.lseek(shared.fileno(), len(found), os.SEEK_SET)
    assert found == list(frames(io.BytesIO(data), len(PREAMBLE), path))


@pytest.mark.parametrize(
    "change",
    [
        {"engine": replace(engine_record(1), request_id=None)},
        {"engine": replace(engine_record(1), cached_tokens=1.0)},
        {"engine": replace(engine_record(1), versions=(VersionSpan(0, 1, 7),))},  # type: ignore[arg-type]
        {"max_new_tokens": None},
        {"stop": 1.5},
        {"fingerprint": "ab"},
        {"sampling": Sampling({1: 2})},  # type: ignore[dict-item]
        {"calls": (CallRecord("look", None, 0, 1),)},  # type: ignore[arg-type]
    ],
    ids=["request", "cached", "version", "max_new_tokens", "stop", "fingerprint", "sampling", "call"],
)
def test_a_turn_that_could_not_be_read_back_is_not_written(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "rollouts.tito"
    with store.LedgerFile(path, "a") as file:
        made = file.attach(ledger(1))
        before = path.read_bytes()
        with pytest.raises(SchemaError, match="Turn 2"):
            made.commit(make_draft(1, 6, [104], [205], **change))
        assert (len(made), path.read_bytes()) == (2, before)
        made.commit(make_draft(1, 6, [104], [205]))
    assert len(store.read(path)[0]) == 3


@pytest.mark.parametrize("uuid", ["", "garbage", ledger(1).uuid.upper() + "x", "{" + ledger(1).uuid + "}", "0" * 32])
def test_a_string_that_is_not_a_uuid_is_not_in_the_file(tmp_path: Path, uuid: str) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1), ledger(0)])
    with store.LedgerFile(path) as file:
        assert ledger(1).uuid in file
        assert uuid not in file
        with pytest.raises(KeyError, match="2 ledgers"):
            file.load(uuid)


def test_another_copy_of_a_ledger_cannot_be_appended(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    one, other = store.read(path)[0], store.read(path)[0]
    one.commit(make_draft(1, 6, [104], [205]))
    other.commit(make_draft(1, 6, [104], [206]))
    other.commit(make_draft(2, 8, [107], [208]))
    store.append(path, [one])
    with pytest.raises(SchemaError, match=r"another copy.*turn 2.*LedgerFile\.resume"):
        store.append(path, [other])
    stranger = Ledger(ledger(1).uuid, task_id="another")
    with pytest.raises(SchemaError, match=f"another ledger.*{stranger.uuid}"):
        store.append(path, [stranger])
    assert [store.encode(each) for each in store.read(path)] == [store.encode(one)]
    store.append(path, [one])
    with pytest.raises(SchemaError, match=r"3 turns and 0 annotations.* 2 and 0.*LedgerFile\.resume"):
        store.append(path, [ledger(1)])  # a copy that is behind its file


def test_a_ledger_from_json_continues_in_its_file(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.commit(make_draft(None, 0, [100], [200], sampling=Sampling({"top_p": 1.0, "seed": None, "min_p": 0.0})))
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger])
    back = store.from_json(store.to_json(ledger))  # its keys have another order
    with store.LedgerFile(path, "a") as file:
        file.attach(back).commit(make_draft(0, 2, [101], [201], sampling=Sampling({"temperature": 1.0})))
    with store.LedgerFile(path) as file:
        assert len(file.load(ledger.uuid)) == 2


def test_only_annotations_follow_the_end_of_a_rollout(tmp_path: Path) -> None:
    """What an END record says of a ledger stays true."""
    path = tmp_path / "rollouts.tito"
    with store.LedgerFile(path, "a") as file:
        file.append(ledger(1), b"facts")
        resumed, before = file.resume(ledger(1).uuid), path.read_bytes()
        for write in (lambda: resumed.commit(make_draft(1, 6, [1], [2])), lambda: file.append(ledger(1), b"others")):
            with pytest.raises(SchemaError, match="has ended"):
                write()
        assert (len(resumed), path.read_bytes()) == (2, before)
        resumed.annotate("reward", 1.0)
        assert file.load(resumed.uuid).annotation("reward") == 1.0


def test_an_attached_ledger_is_resumed_and_a_stale_copy_is_refused(tmp_path: Path) -> None:
    with store.LedgerFile(tmp_path / "rollouts.tito", "a") as file:
        made = file.attach(ledger(1))
        assert file.resume(made.uuid) is made
        uuid = made.uuid
        del made
        again = file.resume(uuid)
        again.commit(make_draft(1, 6, [104], [205]))
        assert file.resume(uuid) is again
        stale = file.load(uuid)
        stale.sink = file
        again.commit(make_draft(2, 8, [105], [206]))
        with pytest.raises(SchemaError, match=r"4 turn.*turn record 3: .*LedgerFile\.resume"):
            stale.commit(make_draft(2, 8, [105], [207]))


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"

    def write(number: int) -> None:
        for _ in range(20):
            store.append(path, [ledger(number)])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert Counter({each.uuid: len(each) for each in store.read(path)}) == {ledger(n).uuid: 2 for n in range(4)}


def test_a_file_of_schema_1_is_read_and_becomes_one_of_schema_2_when_it_is_continued(tmp_path: Path) -> None:
    """Schema 1 had no agents. A version that reads only schema 1 must refuse the file from then on."""
    path, old = tmp_path / "old.tito", ledger(1)
    store.append(path, [old])
    path.write_bytes(path.read_bytes().replace(PREAMBLE, MAGIC + b"\x01", 1))
    written = path.read_bytes()
    with store.LedgerFile(path) as file:
        (found,) = file
    assert ([turn.draft.agent for turn in found], found.agents) == ([None] * len(old), ())
    assert found.last_turn() == len(old) - 1, "without agents it is the latest turn"
    assert path.read_bytes() == written, "reading changes nothing"
    with store.LedgerFile(path, "a") as file:
        again = file.resume(old.uuid)
        again.commit(replace(make_draft(0, 3, [1], [2]), agent="judge", branch=None))
    assert path.read_bytes().startswith(PREAMBLE)
    assert path.read_bytes()[len(PREAMBLE) :].startswith(written[len(PREAMBLE) :])
    with store.LedgerFile(path) as file:
        assert [turn.draft.agent for turn in file.load(old.uuid)] == [*[None] * len(old), "judge"]
    assert to_record(from_record({**to_record(old), "schema": 1})) == to_record(old)


@pytest.mark.parametrize(
    ("start", "words"),
    [(b"dear diary, today", "not a strands-tito rollout file"), (MAGIC + b"\x03", r"schema 3.* 2: upgrade")],
)
def test_another_file_and_a_newer_one_are_refused_and_left_unchanged(start: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(start)
    for use in (lambda: store.read(path), lambda: store.append(path, [ledger(1)])):
        with pytest.raises(SchemaError, match=words):
            use()
    assert path.read_bytes() == start
    with pytest.raises(ValueError, match=r"'r'.*'a'.*'w'"):
        store.LedgerFile(path, "w")  # type: ignore[arg-type]


@pytest.mark.parametrize("reward", [1.0, 0.0])
def test_a_flipped_bit_in_a_reward_that_ends_the_file_drops_no_reward(reward: float, tmp_path: Path) -> None:
    """A record may end with zeros of its own, which are no torn tail."""
    path = tmp_path / "rollouts.tito"
    with store.LedgerFile(path, "a") as file:
        made = file.attach(ledger(1))
        start = path.stat().st_size
        made.annotate("reward", reward)
    whole = path.read_bytes()
    for bit in range(8 * start, 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        for use in (lambda: store.read(path), lambda: store.append(path, [ledger(2)])):
            with pytest.raises(SchemaError, match=r"is damaged|unknown kind"):
                use()
        assert path.read_bytes() == damaged


def test_a_power_cut_that_left_the_last_blocks_of_a_file_zero_is_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    with store.LedgerFile(path, "a") as file:
        file.attach(ledger(1)).annotate("note", "x" * 20_000)
    whole = path.read_bytes()
    for written in range(path.stat().st_size // 4096 * 4096, path.stat().st_size - 20_000, -4096):
        path.write_bytes(whole[:written].ljust(len(whole), b"\0"))
        assert [len(each.annotations) for each in store.read(path)] == [0]


@pytest.mark.parametrize("record", ["in the middle", "the last one"])
def test_a_flipped_bit_is_an_error_and_the_file_is_unchanged(record: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    store.append(path, [ledger(1)])
    first = path.stat().st_size
    store.append(path, [ledger(2), ledger(3)])
    damaged = bytearray(path.read_bytes())
    damaged[-30 if record == "the last one" else first + 30] ^= 1
    path.write_bytes(damaged)
    place = r"\d+" if record == "the last one" else first
    for use in (lambda: store.read(path), lambda: store.append(path, [ledger(4)])):
        with pytest.raises(SchemaError, match=f"byte {place} .*checksum.*restore"):
            use()
    assert path.read_bytes() == bytes(damaged)


class Faulty:
    """A file of which some methods fail, as on a broken or full disk."""

    def __init__(self, file: Any, error: int, *names: str, before: Callable[[], None] = lambda: None) -> None:
        self.file, self.error, self.names, self.before = file, error, names, before

    def __getattr__(self, name: str) -> Any:
        return self.fail if name in self.names else getattr(self.file, name)

    def fail(self, *_: object) -> Any:
        self.before()
        raise OSError(self.error, os.strerror(self.error))


def test_after_a_failed_read_file_and_ledger_have_the_same_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.LedgerFile(tmp_path / "r", "a") as file:
        made = file.attach(Ledger(ledger(1).uuid))
        made.commit(make_draft(None, 0, [100], [200]))
        monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(OSError, match="Input/output error"):
            file.load(ledger(1).uuid)
        with suppress(OSError):
            made.commit(make_draft(0, 2, [101], [201]))
        monkeypatch.undo()
        for turn in range(len(made), 3):
            made.commit(make_draft(turn - 1, 2 * turn, [100 + turn], [200 + turn]))
        assert [store.encode(each) for each in store.read(file.path)] == [store.encode(made)]


def test_a_failed_write_names_the_file_and_does_not_extend_one_that_shrank(tmp_path: Path) -> None:
    with store.LedgerFile(tmp_path / "rollouts", "a") as file:
        made = file.attach(ledger(1))
        full = Faulty(file._file, errno.ENOSPC, "write", before=lambda: os.truncate(file.path, 3))
        file._file = full  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space left") as caught:
            made.annotate("reward", 1.0)
        assert caught.value.filename == str(file.path)
        assert file.path.stat().st_size == 3
