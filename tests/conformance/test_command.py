"""`tito conformance` and the pytest plugin, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance.defects import all_defects
from conformance.defects.defect import latency
from strands_tito import cli
from strands_tito.testing import ScriptedServer
from support.conformance_command import served
from support.scripted import tokenizer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(folder)
    return str(folder)


def run(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160", **(environment or {})},
    )


def conformance(server: ScriptedServer, folder: str, cwd: Path, *more: str) -> subprocess.CompletedProcess[str]:
    backend = server.engine.wire.name
    said = ("--backend", backend, "--base-url", server.base_url, "--tokenizer", folder, "--profile", "quick", *more)
    return run("-c", "from strands_tito.cli import main; main()", "conformance", *said, cwd=cwd)


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
def test_a_sound_server_passes_and_its_report_says_so(wire: str, tokenizer_folder: str, tmp_path: Path) -> None:
    with served(wire) as server:
        done = conformance(server, tokenizer_folder, tmp_path, "--report", "out")
        assert server.engine.running == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every law that applies holds." in done.stdout
    assert "up to 8 conversations" in done.stdout
    stages = ("certifying", "parser=<", "connecting to the server", "measuring the semantics")
    assert [stage for line in done.stdout.splitlines() for stage in stages if stage in line] == list(stages)
    found = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert found["sound"]
    assert found["server"]["model"] == "scripted"
    assert found["certificate"]["tools"]
    assert {check["verdict"] for check in found["checks"]} <= {"holds", "not applicable", "not reached"}
    assert "Every law that applies holds" in (tmp_path / "out" / "conformance.html").read_text()


def test_a_defect_is_told_with_the_smallest_conversation_which_can_be_played_again(
    tokenizer_folder: str, tmp_path: Path
) -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == "length-called-stop")
    with served("sglang", defect) as server:
        done = conformance(server, tokenizer_folder, tmp_path)
        assert done.returncode == 1, done.stdout + done.stderr
        [broken] = [line for line in done.stdout.splitlines() if line.startswith("Law ")]
        assert "broken" in done.stdout
        again = conformance(server, tokenizer_folder, tmp_path, "--replay", "conformance/conversation.json")
        assert again.returncode == 1, again.stdout + again.stderr
        assert broken.partition(":")[0] in again.stdout


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize("after", [1, 40])
def test_an_interrupt_ends_it_cleanly_with_what_is_known(
    wire: str, after: int, tokenizer_folder: str, tmp_path: Path
) -> None:
    with served(wire) as server:
        said = ("--backend", wire, "--base-url", server.base_url, "--tokenizer", tokenizer_folder, "--report", "out")
        command = [sys.executable, "-c", "from strands_tito.cli import main; main()", "conformance", *said]
        running = subprocess.Popen(
            [*command, "--profile", "deep"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
        )
        while sum(len(each.answers) for each in server.engine.exchanges) < 10 + after:  # past what connecting asks
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        out, errors = running.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while server.engine.running:
            assert time.monotonic() < deadline, "a request was left running"
            time.sleep(0.01)
    assert running.returncode == 2, out + errors
    assert "Interrupted: this is what is known so far." in out
    assert "No law was broken by then." in out
    assert "Traceback" not in errors
    found = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert (found["interrupted"], found["sound"], found["broken"], found["error"]) == (True, False, None, None)
    assert "<h1>Not finished</h1>" in (tmp_path / "out" / "conformance.html").read_text()


def test_bad_input_is_told_at_once(tokenizer_folder: str, tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text('[{"type": "Fly"}]')
    with served("vllm") as server:
        assert "quick, standard, deep" in conformance(server, tokenizer_folder, tmp_path, "--profile", "all").stderr
        bad = conformance(server, tokenizer_folder, tmp_path, "--replay", "none.json")
    assert bad.returncode != 0
    assert "holds no conversation" in bad.stderr


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--tolerance", "nan"), "--tolerance must be a number of nats, at least 0, not nan."),
        (("--tolerance", "inf"), "not inf."),
        (("--tolerance", "-1"), "not -1.0."),
        (("--report", "file"), "is a file"),
        (("--report", "file/below"), "--report file/below: nothing can be written there: Not a directory."),
        (("--replay", "binary"), "binary holds no conversation of a report"),
        (("--replay", "deep"), "deep holds no conversation of a report"),
    ],
    ids=lambda value: "-".join(value).replace("/", "-") if isinstance(value, tuple) else "",
)
def test_a_careless_option_is_told_before_the_server_is_asked(
    more: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "file").write_text("Precious.")
    (tmp_path / "binary").write_bytes(b'[{"type": "Ask", "text": "\xff"}]')
    (tmp_path / "deep").write_text("[" * 100_000)
    cli.add_commands()
    with served("vllm") as server:
        said = ["conformance", "--backend", "vllm", "--base-url", server.base_url, "--tokenizer", "none", *more]
        found = CliRunner().invoke(cli.app, said)
        assert not server.engine.exchanges
    assert found.exit_code == 2, found.output
    assert sentence in " ".join(found.output.replace("│", " ").split())


def test_two_servers_are_held_against_each_other(tokenizer_folder: str, tmp_path: Path) -> None:
    with served("vllm") as server, served("sglang") as second:
        against = ("--against-backend", "sglang", "--against-url", second.base_url)
        done = conformance(server, tokenizer_folder, tmp_path, *against, "--report", "out")
        assert server.engine.running == second.engine.running == 0
        assert done.returncode == 0, done.stdout + done.stderr
        assert "on both servers" in done.stdout
        assert "no logprob of an equal token was further apart than 0 nats" in done.stdout
        found = json.loads((tmp_path / "out" / "conformance.json").read_text())
        assert (found["against"]["backend"], found["against"]["apart_nats"]) == ("sglang", 0.0)
        verdicts = {check["check"]: check["verdict"] for check in found["checks"]}
        assert {verdicts[name] for name in ("ledgers", "greedy", "agreed", "rescored")} == {"holds"}
        assert "Beside it sglang" in (tmp_path / "out" / "conformance.html").read_text()
        alone = conformance(server, tokenizer_folder, tmp_path, "--against-backend", "sglang")
    assert alone.returncode != 0
    assert "--against-url" in alone.stderr


def test_weights_change_only_where_they_are_asked_for(tokenizer_folder: str, tmp_path: Path) -> None:
    with served("sglang") as server:
        server.engine.latency = latency
        done = conformance(server, tokenizer_folder, tmp_path, "--weights", "/models/new", "--report", "out")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "The server's weights are changed" in done.stdout
        assert server.engine.state.weight_version.startswith("tito-")
        assert not server.engine.state.paused
    found = json.loads((tmp_path / "out" / "conformance.json").read_text())
    verdicts = {check["check"]: check["verdict"] for check in found["checks"]}
    assert (verdicts["changed"], verdicts["live"], found["weights"]) == ("holds", "holds", "/models/new")


@pytest.mark.parametrize("said", ["2", "2,x", "0,2", "2,2,2"])
def test_experts_are_two_numbers(said: str, tokenizer_folder: str, tmp_path: Path) -> None:
    with served("sglang") as server:
        done = conformance(server, tokenizer_folder, tmp_path, "--experts", said)
    assert done.returncode != 0
    assert "LAYERS,EXPERTS" in done.stderr


@pytest.fixture(scope="module")
def toy_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: the toy backend's module, and what says that it is installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "toy_backend.py").write_text((HERE / "toy" / "toy_backend.py").read_text())
    info = site / "toy_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tito.backends]\ntoy = toy_backend:ToyBackend\n")
    return site


def shifted(answer: dict[str, Any]) -> None:
    answer["logprobs"] = [*answer["logprobs"][1:], *answer["logprobs"][:1]]


@pytest.mark.parametrize("lie", [None, shifted], ids=["sound", "shifted"])
def test_a_third_backend_is_proven_by_the_plugin(
    lie: Any, tokenizer_folder: str, toy_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE / "toy"))
    from toy_server import ToyServer, serving

    loaded = tokenizer()
    path = os.pathsep.join([str(toy_site), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serving(ToyServer(loaded, loaded.eos_token_id, lie=lie)) as url:
        said = (f"--tito-base-url={url}", f"--tito-tokenizer={tokenizer_folder}", "--tito-profile=quick")
        done = run(
            *(
                "-m",
                "pytest",
                "--pyargs",
                "strands_tito.conformance",
                "--tito-backend=toy",
                *said,
                "-p",
                "no:cacheprovider",
                "-rs",
            ),
            cwd=tmp_path,
            environment={"PYTHONPATH": path},
        )
    assert done.returncode == (lie is not None), done.stdout[-3000:] + done.stderr[-1000:]
    assert "no grammar" in done.stdout or lie
    assert ("test_the_law_holds[rescored]" in done.stdout) == (lie is not None), done.stdout[-3000:]


def test_the_third_backend_is_short_and_the_guide_shows_it() -> None:
    code = (HERE / "toy" / "toy_backend.py").read_text()
    assert len(code.splitlines()) < 120
    assert f"```python\n{code}```" in (HERE.parents[1] / "docs" / "conformance.md").read_text()
