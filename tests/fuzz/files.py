"""Hostile files: `.tito`, a ledger as JSON, and the END records of a folder.

A checksum detects damage, not forgery: a file with correct checksums may hold any ledger that keeps the laws. So there
are two oracles.

- Damage (changed bytes, old checksums): the file is refused, or the loaded ledgers are the originals, possibly without
  their last records, since CRC-32 detects the change.
- Another file (changed records, correct checksums): it is refused, or the loaded ledgers equal the records as a
  separate reader decodes them: every token, logprob, provenance, mask and parent. They keep the laws, can be written
  again, and come back equal.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from uuid import UUID

import msgspec
import numpy as np

from fuzz.mutation import changed_bytes, changed_value, dumped
from fuzz.plain_file import ANNOTATION, END, PREAMBLE, TURN, PlainFrame, frames_of, unpacked
from fuzz.target import Outcome, require
from strands_tito.collect import Rollout, RolloutFolder, Tasks, collected
from support.drafts import engine_record, make_draft
from support.made_up import made_up_result
from tito_core import store
from tito_core.ledger import CallRecord, Column, Finish, LawViolationError, Ledger, MediaSpan, Sampling
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.turn import ResponseSpan
from tito_core.store import SchemaError

REFUSED = (SchemaError, LawViolationError)
ORIGINALS = 12


class Files:
    """The target `files`."""

    def __init__(self, seed: int) -> None:
        random = Random(f"files {seed}")
        self._home = Path(mkdtemp())
        self._path = self._home / "rollouts.tito"
        self._originals = [[forest(random) for _ in range(random.choice((1, 1, 2)))] for _ in range(ORIGINALS)]
        self._files = [self._written(ledgers) for ledgers in self._originals]
        self._folder = self._home / "folder"
        with RolloutFolder(self._folder, {}) as folder:
            for task in Tasks.of([{"question": f"What is {number}?"} for number in range(2)]):
                folder.append(made_up_result(Rollout(folder.run, task, 0)))
        self._collected = [store.encode(ledger) for ledger in collected(self._folder)]
        self._rollouts = (self._folder / "rollouts-00001.tito").read_bytes()

    def case(self, random: Random) -> Outcome:
        """Change a file and read it."""
        original = random.randrange(ORIGINALS)
        kinds = (self._damaged, self._another, self._another, self._another, self._json, self._ended)
        return random.choice(kinds)(original, random)

    def _written(self, ledgers: Sequence[Ledger]) -> bytes:
        self._path.unlink(missing_ok=True)
        store.append(self._path, ledgers)
        return self._path.read_bytes()

    def _damaged(self, original: int, random: Random) -> Outcome:
        data = changed_bytes(self._files[original], random)
        whole = {ledger.uuid: store.to_record(ledger) for ledger in self._originals[original]}
        self._path.write_bytes(data)
        try:
            loaded = store.read(self._path)
        except REFUSED:
            return "refused"
        for ledger in loaded:
            require(ledger.uuid in whole, f"a damaged file has a new ledger {ledger.uuid}")
            loaded_record, record = store.to_record(ledger), whole[ledger.uuid]
            require(loaded_record["header"] == record["header"], "a damaged file changes a header")
            for part in ("turns", "annotations"):
                cut = record[part][: len(loaded_record[part])]
                require(_same(loaded_record[part], cut), f"a damaged file changes {part}, instead of cutting them")
        return "accepted"

    def _another(self, original: int, random: Random) -> Outcome:
        frames = _changed_frames(frames_of(self._files[original]), random)
        torn = random.randrange(len(frames) + 1) if frames and random.random() < 0.1 else len(frames)
        data = self._files[original][:PREAMBLE] + b"".join(frame.written() for frame in frames[:torn])
        if torn < len(frames):  # a record that claims more bytes than the file has, as after a crash
            rest = b"".join(frame.written() for frame in frames[torn + 1 :])
            beyond = len(frames[torn].payload) + len(rest) + random.choice((1, 2**20, 2**31))
            data += frames[torn].written(min(beyond, 2**32 - 1)) + rest
        self._path.write_bytes(data)
        try:
            loaded = store.read(self._path)
        except REFUSED:
            return "refused"
        read = frames[:torn]
        uuids = list(dict.fromkeys(str(UUID(bytes=frame.uuid)) for frame in read))
        require([ledger.uuid for ledger in loaded] == uuids, "ledgers are missing, or in another order")
        for ledger in loaded:
            mine = [frame for frame in read if frame.uuid == UUID(ledger.uuid).bytes]
            records = {k: [unpacked(frame.payload) for frame in mine if frame.kind == k] for k in (TURN, ANNOTATION)}
            require(len(ledger.annotations) == len(records[ANNOTATION]), "annotations are missing")
            _expect_records(ledger, records[TURN])
            self._expect_sound(ledger)
        return "accepted"

    def _json(self, original: int, random: Random) -> Outcome:
        value = json.loads(json.dumps(store.to_json(random.choice(self._originals[original]))))
        try:
            changed = json.loads(dumped(changed_value(value, random, raw=True)))
        except (ValueError, RecursionError):  # refused before our code reads it
            return "refused"
        try:
            ledger = store.from_json(changed)
        except REFUSED:
            return "refused"
        require(len(ledger) == len(changed["turns"]), "turns are missing")
        for turn, record in zip(ledger, changed["turns"], strict=True):
            for name, values in record["columns"].items():
                if (column := getattr(turn.draft.columns, name, None)) is None:
                    continue  # another name, perhaps with values that are no array
                expected = np.array(values, np.float32 if name == "logprobs" else np.int64)
                require(np.array_equal(column, expected), f"turn {turn.index}: {name} differs from the JSON")
        self._expect_sound(ledger)
        return "accepted"

    def _ended(self, _: int, random: Random) -> Outcome:
        frames = frames_of(self._rollouts)
        at = random.choice([number for number, frame in enumerate(frames) if frame.kind == END])
        value = changed_value(unpacked(frames[at].payload), random)
        try:
            frames[at] = PlainFrame(END, frames[at].uuid, msgspec.msgpack.encode(_nested(value, random)))
        except OverflowError:  # MessagePack cannot hold it
            return "refused"
        data = self._rollouts[:PREAMBLE] + b"".join(frame.written() for frame in frames)
        (self._folder / "rollouts-00001.tito").write_bytes(data)
        try:
            read = [store.encode(ledger) for ledger in collected(self._folder)]
        except REFUSED:
            return "refused"
        require(read == self._collected, "another END record changes ledgers")
        return "accepted"

    def _expect_sound(self, ledger: Ledger) -> None:
        """Check the laws, and that the ledger can be used, written and read again."""
        check_ledger(ledger)
        encoded = store.encode(ledger)
        ledger.tree()
        ledger.trajectories()
        require(
            store.encode(store.from_record(store.to_record(ledger))) == encoded, "the record does not come back equal"
        )
        again = store.from_json(json.loads(json.dumps(store.to_json(ledger))))
        same = repr(store.to_record(again)) == repr(store.to_record(ledger))  # JSON has one NaN, a file has many
        require(same, "the JSON does not come back equal")
        self._written([ledger])
        require(store.encode(store.read(self._path)[0]) == encoded, "the file does not come back equal")


def forest(random: Random) -> Ledger:
    """Return a random ledger of up to six turns."""
    ledger = Ledger(
        str(UUID(int=random.getrandbits(128), version=4)), task_id="task", user={"seed": [1, None, 0.5, "é"]}
    )
    for index in range(random.randrange(7)):
        parent = random.choice([None, index - 1, index - 1, random.randrange(index)]) if index else None
        start = ledger.path_length(parent)
        prompt = [random.randrange(100, 200) for _ in range(random.randrange(1, 6))]
        output = [random.randrange(200, 300) for _ in range(random.randrange(1, 6))]
        engine = engine_record(len(output), random.randrange(6))
        if random.random() < 0.2:
            engine = replace(engine, responses=(ResponseSpan(0, len(output), "again"),))
        rows = np.array([[random.randrange(300)] for _ in output])
        extras = {"routed_experts": Column.of(0, rows[:1])} if random.random() < 0.4 else {}
        if random.random() < 0.3:
            extras |= {"top_ids": Column.of(start + len(prompt), rows)}
            extras |= {"top_logprobs": Column.of(start + len(prompt), -rows.astype(np.float32))}
        ledger.commit(
            make_draft(
                parent,
                start,
                prompt,
                output,
                constrained=random.random() < 0.3,
                prompt_provenance=np.array([random.randrange(3) for _ in prompt], np.uint8),
                finish=random.choice(list(Finish)),
                stop=random.choice([None, 2, "END"]),
                sampling=Sampling({"temperature": random.choice([0.5, 1.0]), "stop": ["a"]}),
                calls=(CallRecord("look", "ok", 0, 1),) if random.random() < 0.4 else (),
                media=(MediaSpan(start, 1, bytes(32)),) if random.random() < 0.2 else (),
                engine=engine,
                extras=extras,
            )
        )
    ledger.annotate("reward", random.random())
    if len(ledger):
        ledger.annotate("note", {"why": ["a", None]}, turn=random.randrange(len(ledger)))
    return ledger


def _changed_frames(frames: list[PlainFrame], random: Random) -> list[PlainFrame]:
    index = random.randrange(len(frames))
    frame, change = frames[index], random.randrange(10)
    if change < 4:
        try:
            payload = msgspec.msgpack.encode(_nested(changed_value(unpacked(frame.payload), random), random))
        except OverflowError:  # MessagePack cannot hold it
            payload = b""
        frames[index] = PlainFrame(frame.kind, frame.uuid, payload)
    elif change < 7:
        frames[index] = PlainFrame(frame.kind, frame.uuid, changed_bytes(frame.payload, random))
    elif change == 7:
        other = random.randrange(len(frames))
        frames[index], frames[other] = frames[other], frames[index]
    elif change == 8:
        frames[index : index + 1] = [frame] * random.choice((0, 2))
    else:
        uuid = random.choice([random.randbytes(16), random.choice(frames).uuid])
        frames[index] = PlainFrame(random.choice((frame.kind, 1, 2, 3)), uuid, frame.payload)
    return frames


def _nested(value: Any, random: Random) -> Any:
    """Put a deeply nested value into a record, one time in ten."""
    if not isinstance(value, dict) or not value or random.random() < 0.9:
        return value
    depth = random.choice((90, 150, 400, 900, 5_000))
    return {**value, random.choice(list(value)): msgspec.Raw(random.choice((b"\x91", b"\x81\xa1a")) * depth + b"\x01")}


def _expect_records(ledger: Ledger, turns: list[Any]) -> None:
    """Compare a loaded ledger with its records as `plain_file` reads them."""
    require(len(ledger) == len(turns), "turns are missing")
    paths: list[list[tuple[int, float, int]]] = []
    for turn, record in zip(ledger, turns, strict=True):
        prompt, output = record["columns"]["prompt"], record["columns"]["output"]
        values = struct.unpack(f"<{prompt + output}i{output}f{prompt}B", record["columns"]["buffer"])
        provenance = 4 if record.get("constrained", False) else 3
        own = [(values[i], math.nan, values[prompt + 2 * output + i]) for i in range(prompt)]
        own += [(values[prompt + i], values[prompt + output + i], provenance) for i in range(output)]
        parent = record.get("parent")
        require(turn.parent == parent, f"turn {turn.index} has parent {turn.parent}, the file has {parent}")
        for name in ("prompt_length", "finish", "fingerprint", "max_new_tokens"):
            require(getattr(turn.draft, name) == record[name], f"turn {turn.index}: {name} differs from the file")
        paths.append((paths[parent] if parent is not None else []) + own)
    for trajectory in ledger.trajectories():
        expected = paths[trajectory.path[-1].index]
        require(trajectory.token_ids.tolist() == [token for token, _, _ in expected], "token ids differ from the file")
        require(trajectory.provenance.tolist() == [kind for _, _, kind in expected], "provenance differs from the file")
        logprobs = np.array([logprob for _, logprob, _ in expected], np.float32)
        require(np.array_equal(trajectory.logprobs, logprobs, equal_nan=True), "logprobs differ from the file")
        may = [kind == 3 for _, _, kind in expected]
        require(
            all(not mask or ok for mask, ok in zip(trajectory.loss_mask.tolist(), may, strict=True)),
            "the mask is wrong",
        )


def _same(one: Any, other: Any) -> bool:
    return bool(msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other))
