from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fake_engine import FAKE, MINOR, Variant, processes_of, wait_until_gone, wheel
from tito_engines import (
    Cancelled,
    CannotInstall,
    EngineEnv,
    EngineSpec,
    InstallFailed,
    UnknownEngine,
    ensure,
    find,
    install,
)
from tito_engines.cache import MANIFEST
from tito_engines.install import environment_dir


def test_the_first_call_installs_and_later_ones_find_it_or_make_it_anew(fake: EngineSpec) -> None:
    reported: list[str] = []
    first = ensure(fake, progress=lambda text, fraction=None: reported.append(text))
    stamp = (first.root / MANIFEST).stat().st_mtime_ns
    again = ensure(fake)
    assert again == first
    assert (first.root / MANIFEST).stat().st_mtime_ns == stamp
    assert subprocess.run([first.python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True,
                          check=True).stdout.strip() == str(first.root)  # fmt: skip
    assert any("installed in" in line for line in reported)

    (first.root / MANIFEST).unlink()
    (first.root / "half").write_text("done")
    assert ensure(fake).root == first.root
    assert not (first.root / "half").exists()
    assert json.loads((first.root / MANIFEST).read_text())["engine"] == "Fake 1.0"
    first.python.unlink()
    assert ensure(fake).python.exists()


def test_processes_that_ask_at_once_install_once(variant: Variant, tmp_path: Path) -> None:
    log = tmp_path / "installations"
    check = f"import time; open({str(log)!r}, 'a').write('x'); time.sleep(0.3)"
    script = (
        "from dataclasses import replace\n"
        "from support.fake_engine import FAKE; from tito_engines import ensure\n"
        f"print(ensure(replace(FAKE, import_check={check!r})).root)"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path(__file__).parents[1])
        for _ in range(3)
    ]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(answers) == 1
    assert log.read_text() == "x"


def test_the_key_follows_everything_that_is_installed(fake: EngineSpec, tmp_path: Path) -> None:
    (tmp_path / "standin.py").write_text("x = 1\n")
    with_standin = replace(fake, standins=(tmp_path,))
    keys = {
        fake.key(MINOR),
        replace(fake, locks={MINOR: "a==1\n"}).key(MINOR),
        with_standin.key(MINOR),
        replace(with_standin, standin_startup="standin").key(MINOR),
    }
    (tmp_path / "standin.py").write_text("x = 2\n")
    keys.add(with_standin.key(MINOR))
    assert len(keys) == 5
    unchanged = replace(fake, title="another", locks={MINOR: "# another comment\n"})
    assert fake.key(MINOR) == unchanged.key(MINOR)


def test_stand_ins_are_on_the_path_of_every_python_there(variant: Variant, tmp_path: Path) -> None:
    folder = tmp_path / "standins"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "__init__.py").write_text("WHERE = __file__\n")
    (folder / "at_start.py").write_text("import builtins\nbuiltins.started = True\n")
    spec = variant(standins=(folder,), standin_startup="at_start", import_check="import pkg; assert started")
    env = ensure(spec)
    where = subprocess.run([env.python, "-I", "-c", "import pkg; print(pkg.WHERE)"], capture_output=True, text=True,
                           check=True)  # fmt: skip
    assert where.stdout.startswith(str(env.root))


def test_a_failed_check_leaves_nothing_and_shows_the_last_lines(variant: Variant) -> None:
    spec = variant(import_check="import no_such_engine")
    for _ in range(2):
        with pytest.raises(InstallFailed, match=r"(?s)Fake 1\.0.*status 1.*No module named 'no_such_engine'"):
            ensure(spec)
        assert not environment_dir(spec, MINOR).exists()


def test_an_installation_can_be_cancelled(variant: Variant) -> None:
    cancel = threading.Event()
    spec = variant(import_check="import time; time.sleep(60)")
    threading.Timer(0.7, cancel.set).start()
    with pytest.raises(Cancelled):
        ensure(spec, cancel=cancel)


def test_a_killed_installation_leaves_no_process_and_is_redone(variant: Variant, cache: Path) -> None:
    script = (
        "from dataclasses import replace\n"
        "from support.fake_engine import FAKE; from tito_engines import ensure\n"
        "ensure(replace(FAKE, import_check='import time; time.sleep(600)'))"
    )
    installer = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[1])
    while not processes_of(cache):
        time.sleep(0.05)
    installer.kill()
    installer.wait()
    wait_until_gone(cache)
    assert ensure(variant()).python.exists()


def test_a_disk_that_is_too_small_is_said_before_anything_is_fetched(variant: Variant) -> None:
    with pytest.raises(CannotInstall, match=r"900000000 MB.* \d+ MB left.*TITO_CACHE_DIR"):
        ensure(variant(locks={MINOR: "# disk: 900000000 MB\nenginea==1.0\n"}))


def test_a_cache_that_cannot_be_made(fake: EngineSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CannotInstall, match="TITO_CACHE_DIR"):
        ensure(fake)


def test_another_processor_is_told_what_else_works(fake: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(CannotInstall, match=r"Linux on x86_64.*Darwin on arm64.*make demo BASE_URL="):
        ensure(fake)


def test_without_a_python_that_has_a_lock(variant: Variant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotInstall, match=r"needs Python 3\.7 .*cpython 3\.1.*--python.*BASE_URL="):
        ensure(variant(locks={"3.7": ""}))


def test_a_python_that_was_named_and_will_not_do(fake: EngineSpec, tmp_path: Path) -> None:
    with pytest.raises(CannotInstall, match=re.escape(f"nothing to run at {tmp_path / 'python'}")):
        ensure(fake, python=tmp_path / "python")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'No module named ensurepip' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(CannotInstall, match=r"python3-venv.*broken: No module named ensurepip"):
        ensure(fake, python=broken)


def test_another_python_is_found_on_the_path(variant: Variant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that says it is 3.7 and makes the environment with ours: what `choose` sees of an interpreter."""
    monkeypatch.setenv("PATH", str(tmp_path))
    python = tmp_path / "python3.7"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -I ]; then echo cpython 3.7; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    assert ensure(variant(locks={"3.7": ""})).root.name.endswith("-py37")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownEngine, match=r"'vlm'.*sglang, vllm"):
        find("vlm")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Pip finds the packages of this folder and no others."""
    folder = tmp_path_factory.mktemp("shelf")
    wheel(folder, "enginea", "1.0")
    wheel(folder, "engineb", "2.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_FIND_LINKS", str(folder))
        patch.setenv("PIP_INDEX_URL", (folder / "empty").as_uri())
        patch.setenv("PIP_EXTRA_INDEX_URL", "")
        yield folder


@pytest.fixture(scope="module")
def reported() -> list[tuple[str, float | None]]:
    return []


@pytest.fixture(scope="module")
def installed(
    shelf: Path, reported: list[tuple[str, float | None]], tmp_path_factory: pytest.TempPathFactory
) -> EngineEnv:
    """An engine of three packages; torch comes from an index, here a folder of folders under a file: URL."""
    index = tmp_path_factory.mktemp("index") / "torch"
    index.mkdir()
    wheel(index, "torch", "2.13.0+cpu")
    links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in index.glob("*.whl"))
    (index / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    check = "import enginea, engineb, torch; assert (engineb.VERSION, torch.VERSION) == ('2.0', '2.13.0+cpu')"
    lock = "# download: 3 MB\nenginea==1.0\nengineb==2.0\ntorch==2.13.0+cpu\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TITO_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return ensure(
            replace(FAKE, locks={MINOR: lock}, import_check=check),
            torch_index=index.parent.as_uri(),
            progress=lambda text, fraction=None: reported.append((text, fraction)),
        )


def test_a_lock_is_installed_by_pip_with_progress(
    installed: EngineEnv, reported: list[tuple[str, float | None]]
) -> None:
    assert "fetching about 3 MB" in reported[0][0]
    assert any("pip: Installing collected packages: torch, engineb, enginea" in text for text, _ in reported)
    assert "lib" in os.listdir(installed.root)
    assert not [name for name in os.listdir(installed.root) if name.startswith("tmp")]


def test_without_a_cpu_build_of_torch_uv_is_asked_and_then_the_option_is_named(
    shelf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here pip's configuration constrains torch, and pip's message is another one than in the next test."""
    (tmp_path / "constraints.txt").write_text("torch<99\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    monkeypatch.setattr(install, "UV", stand_in(tmp_path, "echo error: Failed to fetch; exit 2"))
    with pytest.raises(InstallFailed, match=r"(?s)No CPU build.*--torch-index URL.*TITO_TORCH_INDEX.*Failed to fetch"):
        ensure(replace(FAKE, locks={MINOR: "torch==2.14.0+cpu\n"}))


def test_a_cpu_build_of_torch_that_uv_finds_is_used(
    shelf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(tmp_path, "torch", "2.14.0+cpu")
    monkeypatch.setattr(install, "UV", stand_in(tmp_path, f'echo "$@" > {tmp_path}/asked; exec "$4" -m pip {FOUND}'))
    check = "import enginea, torch; assert torch.VERSION == '2.14.0+cpu'"
    lock = "enginea==1.0\ntorch==2.14.0+cpu\n"
    python = ensure(replace(FAKE, locks={MINOR: lock}, import_check=check)).python
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["pip", "install", "--python", str(python), "--no-deps", "--torch-backend", "cpu", lock.split()[1]]


FOUND = 'install -q --no-deps --find-links "$(dirname "$0")" torch==2.14.0+cpu'


def stand_in(folder: Path, script: str) -> tuple[str]:
    """Return the command of a program that stands for uv, whose index no test reaches."""
    program = folder / "uv"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return (str(program),)


def test_uv_takes_the_words_that_it_is_given(tmp_path: Path) -> None:
    """The real one, without a network: it refuses none of the options, and finds no such build."""
    words = ["pip", "install", "--python", sys.executable, "--no-deps", "--torch-backend", "cpu", "torch==0+cpu"]
    done = subprocess.run([*install.UV, *words, "--offline", "--cache-dir", tmp_path], capture_output=True, text=True)
    assert (done.returncode, "torch==0+cpu" in done.stderr) == (1, True), done.stderr
