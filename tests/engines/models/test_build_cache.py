"""A directory is built once, completely or not at all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tito_engines import cache
from tito_engines.cache import build_once, manifest

SCRIPT = """
import importlib.util, sys, threading
from pathlib import Path
spec = importlib.util.spec_from_file_location("build_cache", sys.argv[1])
build_cache = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = build_cache
spec.loader.exec_module(build_cache)

def build(directory):
    with open(sys.argv[2], "a") as stream:
        stream.write("built\\n")
    threading.Event().wait(0.3)
    (directory / "model.bin").write_bytes(b"weights")

threads = [threading.Thread(target=build_cache.build_once, args=(Path(sys.argv[3]), build)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""Loads the module alone: its package would load transformers."""


def test_threads_and_processes_build_once(tmp_path: Path) -> None:
    log, target = tmp_path / "log", tmp_path / "cache" / "tiny-0123"
    command = [sys.executable, "-c", SCRIPT, cache.__file__, str(log), str(target)]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert log.read_text() == "built\n"
    assert (target / "model.bin").read_bytes() == b"weights"


def test_a_waiter_reports_progress(tmp_path: Path) -> None:
    target, entered, leave, reported = tmp_path / "tiny", threading.Event(), threading.Event(), threading.Event()

    def build(directory: Path) -> None:
        entered.set()
        leave.wait(20)
        (directory / "file").write_text("x")

    first = threading.Thread(target=build_once, args=(target, build))
    first.start()
    entered.wait(20)
    second = threading.Thread(target=build_once, args=(target, build), kwargs={"report": lambda _: reported.set()})
    second.start()
    assert reported.wait(20)
    leave.set()
    first.join()
    second.join()


def test_a_failed_build_leaves_nothing_and_the_next_works(tmp_path: Path) -> None:
    target = tmp_path / "tiny"

    def fails(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ValueError("disk on fire")

    with pytest.raises(ValueError, match="disk on fire"):
        build_once(target, fails)
    assert not target.exists()
    assert build_once(target, lambda directory: (directory / "file").touch()) == target


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "unreadable manifest"])
def test_a_damaged_directory_is_built_again(tmp_path: Path, damage: str) -> None:
    target = tmp_path / "tiny"

    def build(directory: Path) -> None:
        (directory / "file").write_text("whole")

    build_once(target, build, about={"recipe": "abc"})
    if damage == "truncated":
        (target / "file").write_text("who")
    elif damage == "missing":
        (target / "file").unlink()
    elif damage == "no manifest":
        (target / "tito_build.json").unlink()
    else:
        (target / "tito_build.json").write_text("{")
    build_once(target, build, about={"recipe": "abc"})
    assert (target / "file").read_text() == "whole"
    found = manifest(target)
    assert found is not None
    assert found["recipe"] == "abc"
