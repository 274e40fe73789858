"""Task files: valid tasks are read as they were written, an invalid one raises an error with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strands_tito.collect import TaskError, Tasks

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "id"), VALUES, max_size=4)
BLANK = st.sampled_from(["", " ", "\t", "\r"])
BAD = st.sampled_from(["{", "[1, 2]", '"text"', "17", "null", '{"id": true}', '{"id": ""}', '{"id": 1.5}', "{'a': 1}"])
SETTINGS = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def numbered(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Objects, some with an id of their own: a string or a number."""
    objects = draw(st.lists(OBJECTS, min_size=1, max_size=8))
    for number, value in enumerate(objects):
        if draw(st.booleans()):
            value["id"] = draw(st.sampled_from([number, f"task {number}", f"é{number}"]))
    return objects


@given(objects=numbered(), blanks=st.lists(BLANK, min_size=8, max_size=8), bom=st.booleans(), last=st.booleans())
@SETTINGS
def test_a_file_gives_its_tasks_in_order_whatever_lies_between(
    tmp_path: Path, objects: list[dict[str, Any]], blanks: list[str], bom: bool, last: bool
) -> None:
    lines: list[str] = []
    at: list[int] = []
    for value, blank in zip(objects, blanks, strict=False):
        lines += [json.dumps(value, ensure_ascii=len(lines) % 3 == 0), blank]
        at.append(len(lines) - 1)
    path = tmp_path / "tasks.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + "\n".join(lines).encode() + (b"\n" if last else b""))
    tasks = Tasks.of(path)
    for _ in range(2):
        found = list(tasks)
        assert [dict(task.value) for task in found] == objects
        ids = [str(value["id"]) if "id" in value else f"line-{line}" for value, line in zip(objects, at, strict=True)]
        assert [task.id for task in found] == ids
        assert len(tasks) == len({task.id for task in found}) == len(objects)
    assert [task.digest for task in Tasks.of(objects)] == [task.digest for task in found]


@pytest.mark.parametrize("line", ["[" * 200_000, '{"a":' * 200_000 + "1" + "}" * 200_000])
def test_a_nested_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(TaskError, match=r"tasks\.jsonl, line 2 "):
        Tasks.of(path)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(TaskError, match=r"line 1: .*not JSON"):
        Tasks.of([deep])


@given(objects=numbered(), bad=BAD, where=st.integers(0, 8))
@SETTINGS
def test_a_bad_line_is_named(tmp_path: Path, objects: list[dict[str, Any]], bad: str, where: int) -> None:
    lines = [json.dumps(value) for value in objects]
    lines.insert(where := min(where, len(lines)), bad)
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TaskError, match=rf"tasks\.jsonl, line {where + 1}\b"):
        Tasks.of(path)


@given(left=OBJECTS, right=OBJECTS)
@SETTINGS
def test_tasks_have_one_digest_exactly_when_they_are_the_same_json(left: dict[str, Any], right: dict[str, Any]) -> None:
    (one,), (other,) = Tasks.of([left]), Tasks.of([right])
    same = json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
    assert (one.digest == other.digest) == same
    (turned,) = Tasks.of([dict(reversed(left.items()))])
    assert turned.digest == one.digest


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        (['{"id": "a"}', "", '{"id": "a"}'], "line 3: line 1 .*'a'"),
        (['{"id": 7}', '{"id": "7"}'], "line 2: line 1 .*'7'"),
        (['{"id": "line-2"}', "{}"], "line 2: line 1 .*'line-2'"),
        ([], "no tasks: write one JSON object per line"),
        (["", "  "], "no tasks"),
        (['{"prompt": "a"}', '{"Prompt": "b"}'], "line 2: 'prompt' must be .*not None"),
        (['{"prompt": []}'], r"line 1: 'prompt' must be .*not \[\]"),
    ],
)
def test_invalid_tasks_raise(tmp_path: Path, lines: list[str], pattern: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(TaskError, match=rf"tasks\.jsonl.*{pattern}"):
        Tasks.of(path, need_prompt="rompt" in "".join(lines))


@pytest.mark.parametrize("line", [b'{"a": "\xff\xfe"}', b'{"id": "\\ud800"}'], ids=["no text", "lone surrogate"])
def test_what_is_not_json_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(TaskError, match="line 2 is not JSON"):
        Tasks.of(path)
    with pytest.raises(TaskError, match=r"line 2: .*not JSON"):
        Tasks.of([{}, {"a": object()}])
    with pytest.raises(TaskError, match=r"none\.jsonl .*No such file"):
        Tasks.of(tmp_path / "none.jsonl")
