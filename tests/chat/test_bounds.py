"""Templates that would take the process with them are refused before they run in it."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.byte_level import byte_level
from tito_core.chat.bounds import excess_of
from tito_core.chat.rendering import TemplateError
from tito_core.chat.template import ChatTemplate

HUGE = "{{ '%2000000000d' % 5 }}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [("{{ 10**(10**9) }}", "1 seconds of CPU"), (HUGE, "1 GiB of memory")],
)
def test_a_template_without_an_end_is_refused_before_it_runs_here(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tito_core.chat.bounds.MOST_SECONDS", 1)
    with pytest.raises(TemplateError, match=f"takes more than {reason}"):
        ChatTemplate.of(byte_level((), source), certificates=tmp_path)


def test_where_no_process_starts_the_template_is_not_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("no fork")

    monkeypatch.setattr(subprocess, "run", refuse)
    assert excess_of("{{ 1 }}", {}, [{}]) is None
    assert "not bounded" in caplog.text
