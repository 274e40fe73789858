"""`tito conformance` and the pytest plugin, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from conformance.defects import all_defects
from conformance.defects.defect import latency
from support.conformance_command import served
from support.distributions import write_distribution
from support.scripted import tokenizer
from support.typed import tito
from tito_conformance.testing import Fault, ScriptedServer

HERE = Path(__file__).parent
pytestmark = pytest.mark.suite


def run(*arguments: str, cwd: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "160", **(environment or {})},
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of commands that run in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def conformance(server: ScriptedServer, folder: str, *more: str) -> Result:
    """Run `tito conformance` in this process."""
    options = ("--backend", server.engine.wire.name, "--base-url", server.base_url, "--tokenizer", folder)
    return tito("conformance", *options, "--profile", "quick", *more)


def words(result: Result) -> str:
    """Return the output without frames and line breaks."""
    return " ".join(result.output.replace("│", " ").split())


def test_a_sound_server_passes_and_gets_a_report(folder: str, tmp_path: Path) -> None:
    with served("vllm") as server:
        options = ("--backend", "vllm", "--base-url", server.base_url, "--tokenizer", folder)
        command = ("-c", "from strands_tito.cli import main; main()", "conformance", *options, "--profile", "quick")
        done = run(*command, "--report", "out", cwd=tmp_path)
        assert server.engine.running == 0
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every law that applies holds: " in done.stdout
    assert "up to 8 conversations" in done.stdout
    stages = ("certifying", "parser=<", "connecting to the server", "measuring the semantics")
    assert [stage for line in done.stdout.splitlines() for stage in stages if stage in line] == list(stages)
    report = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert report["sound"]
    assert report["server"]["model"] == "scripted"
    assert report["certificate"]["tools"]
    assert {check["verdict"] for check in report["checks"]} <= {"holds", "not applicable", "not reached"}
    assert "Every law that applies holds" in (tmp_path / "out" / "conformance.html").read_text()


def test_a_defect_is_reported_with_the_smallest_conversation_which_can_be_replayed(folder: str, here: Path) -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == "cached-whole")
    with served("sglang", defect) as server:
        options = ("--model", "scripted", "--dtype", "float32", "--seeds")
        done = conformance(server, folder, *options)
        assert done.exit_code == 1, done.output
        assert " ".join(options) in words(done)  # the replay is of the same model, under the same bounds
        [broken] = [line for line in done.output.splitlines() if line.startswith("Law ")]
        assert "broken" in done.output
        assert "--replay conformance/conversation.json" in done.output
        again = conformance(server, folder, "--replay", "conformance/conversation.json")
        assert again.exit_code == 1, again.output
        assert broken.partition(":")[0] in again.output


@pytest.mark.parametrize(("wire", "after", "number", "status"), [("vllm", 1, 15, 143), ("sglang", 40, 2, 2)])
def test_an_interrupt_ends_the_run_with_the_results_so_far(
    wire: str, after: int, number: int, status: int, folder: str, tmp_path: Path
) -> None:
    with served(wire) as server:
        options = ("--backend", wire, "--base-url", server.base_url, "--tokenizer", folder, "--report", "out")
        command = [sys.executable, "-c", "from strands_tito.cli import main; main()", "conformance", *options]
        running = subprocess.Popen(
            [*command, "--profile", "deep"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell may have it ignored
        )
        while sum(len(each.answers) for each in server.engine.exchanges) < 10 + after:  # more than connecting sends
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(number)
        out, errors = running.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while server.engine.running:
            assert time.monotonic() < deadline, "a request was left running"
            time.sleep(0.01)
    assert running.returncode == status, out + errors
    assert "Interrupted. Results so far:" in out
    assert "No law was broken so far." in out
    assert "checks ran, in " in out
    assert "not checked: " in out
    assert "Traceback" not in errors
    report = json.loads((tmp_path / "out" / "conformance.json").read_text())
    assert (report["interrupted"], report["sound"], report["broken"], report["error"]) == (True, False, None, None)
    assert "<h1>Not finished</h1>" in (tmp_path / "out" / "conformance.html").read_text()


@pytest.mark.parametrize("after", [30, 90, 160], ids=["first checks", "conversations", "last checks"])
def test_an_error_of_the_server_ends_the_run_with_the_results_so_far(after: int, folder: str, here: Path) -> None:
    with served("sglang") as server:
        server.engine.fault = lambda number, request: Fault(status=400) if number > after else None
        done = conformance(server, folder, "--report", "out")
    assert done.exit_code == 1, done.output
    assert isinstance(done.exception, SystemExit)
    report = json.loads((here / "out" / "conformance.json").read_text())
    assert (report["sound"], report["broken"], report["interrupted"]) == (False, None, False)
    assert report["error"].startswith("BadRequestError: ")
    assert report["requests"] > after - 20  # connecting sends up to 20
    assert report["required_not_reached"]
    assert f"not checked: {', '.join(report['required_not_reached'])}" in words(done)
    assert "checks ran, in " in words(done)
    assert "<h1>Not finished</h1>" in (here / "out" / "conformance.html").read_text()


@pytest.mark.parametrize(
    ("more", "values"),
    [
        (("--profile", "all"), ("--profile", "quick, standard, deep", "'all'")),
        (("--profile", "production", "--weights", "/w"), ("--profile production", "--weights")),
        (("--tolerance", "nan"), ("--tolerance", "nan")),
        (("--tolerance", "inf"), ("--tolerance", "inf")),
        (("--tolerance", "-1"), ("--tolerance", "-1.0")),
        (("--require", "samplr"), ("'samplr'", "sampler")),
        (("--not-require", "all"), ("'all'", "sampler")),
        (("--report", "file"), ("--report", "file")),
        (("--report", "file/below"), ("--report", "file/below", "Not a directory")),
        (("--replay", "unknown"), ("--replay", "unknown", "Fly")),
        (("--replay", "binary"), ("--replay", "binary")),
        (("--replay", "deep"), ("--replay", "deep")),
        (("--experts", "2"), ("LAYERS,EXPERTS", "'2'")),
        (("--experts", "2,x"), ("LAYERS,EXPERTS", "'2,x'")),
        (("--experts", "0,2"), ("LAYERS,EXPERTS", "'0,2'")),
        (("--experts", "2,2,2"), ("LAYERS,EXPERTS", "'2,2,2'")),
        (("--against-backend", "sglang"), ("--against-backend", "--against-url")),
        (("--weights", "/w", "--against-url", "http://x"), ("--weights", "--against-url")),
        (("--weights", "/a", "--weights", "/b", "--weights", "/c"), ("--weights", "two folders", "'/c'")),
    ],
    ids=lambda value: "-".join(value).replace("/", "-") if isinstance(value, tuple) else "",
)
def test_an_invalid_option_is_refused_before_any_request(
    more: tuple[str, ...], values: tuple[str, ...], here: Path
) -> None:
    (here / "file").write_text("Precious.")
    (here / "unknown").write_text('[{"type": "Fly"}]')
    (here / "binary").write_bytes(b'[{"type": "Ask", "text": "\xff"}]')
    (here / "deep").write_text("[" * 100_000)
    with served("vllm") as server:
        result = conformance(server, "none", *more)
        assert not server.engine.exchanges
    assert result.exit_code == 2, result.output
    assert all(value in words(result) for value in values), result.output
    assert (here / "file").read_text() == "Precious."


def test_a_required_check_that_did_not_run_has_a_status_of_its_own(folder: str, here: Path) -> None:
    with served("vllm") as server:
        server.engine.state.max_logprobs = 0
        statuses = [
            conformance(server, folder, *more)
            for more in ((), ("--not-require", "sampler"), ("--not-require", "sampler", "--require", "left"))
        ]
    assert [done.exit_code for done in statuses] == [3, 0, 3]
    assert "not checked: sampler" in words(statuses[0])
    assert "--not-require" in words(statuses[0])
    assert "not checked: left" in words(statuses[2])
    assert "Every law that applies holds" not in words(statuses[0])


def test_a_replay_requires_what_its_options_name(folder: str, here: Path) -> None:
    (here / "moves").write_text('[{"type": "Ask"}]')
    with served("vllm") as server:
        ran = conformance(server, folder, "--replay", "moves", "--require", "prompt")
        done = conformance(server, folder, "--replay", "moves", "--require", "sampler", "--report", "out")
    assert (ran.exit_code, done.exit_code) == (0, 3), done.output
    report = json.loads((here / "out" / "conformance.json").read_text())
    assert (report["sound"], report["required"], report["required_not_reached"]) == (False, ["sampler"], ["sampler"])
    page = (here / "out" / "conformance.html").read_text()
    assert "Every law that applies holds" not in page
    assert "Required, but not checked: sampler." in page


def test_two_servers_are_compared(folder: str, here: Path) -> None:
    with served("vllm") as server, served("sglang") as second:
        against = ("--against-backend", "sglang", "--against-url", second.base_url)
        done = conformance(server, folder, *against, "--report", "out")
        assert server.engine.running == second.engine.running == 0
    assert done.exit_code == 0, done.output
    assert "on both servers" in words(done)
    assert "logprobs of equal tokens differ by at most 0 nats" in words(done)
    report = json.loads((here / "out" / "conformance.json").read_text())
    assert (report["against"]["backend"], report["against"]["apart_nats"]) == ("sglang", 0.0)
    verdicts = {check["check"]: check["verdict"] for check in report["checks"]}
    assert {verdicts[name] for name in ("ledgers", "greedy", "agreed", "rescored")} == {"holds"}
    assert "Compared with sglang" in (here / "out" / "conformance.html").read_text()


def test_weights_change_only_on_request(folder: str, here: Path) -> None:
    with served("sglang") as server:
        server.engine.latency = latency
        folders = ("/models/new", "/models/newer")
        given = [part for folder in folders for part in ("--weights", folder)]
        done = conformance(server, folder, *given, "--report", "out")
        assert done.exit_code == 0, done.output
        assert "The server's weights are changed" in words(done)
        state = server.engine.state
        assert state.weight_version.startswith("tito-")
        assert state.folders[state.weights] == folders[0]
        assert not server.engine.state.paused
    report = json.loads((here / "out" / "conformance.json").read_text())
    verdicts = {check["check"]: check["verdict"] for check in report["checks"]}
    assert (verdicts["changed"], verdicts["live"], report["weights"]) == ("holds", "holds", list(folders))


@pytest.fixture(scope="module")
def toy_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed distribution of the toy backend."""
    source, points = (HERE / "toy" / "toy_backend.py").read_text(), "[tito.backends]\ntoy = toy_backend:ToyBackend\n"
    return write_distribution(tmp_path_factory.mktemp("site"), "toy_backend", source, points)


def shifted(answer: dict[str, Any]) -> None:
    answer["logprobs"] = [*answer["logprobs"][1:], *answer["logprobs"][:1]]


@pytest.mark.parametrize("lie", [None, shifted], ids=["sound", "shifted"])
def test_the_plugin_tests_a_third_backend(
    lie: Any, folder: str, toy_site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE / "toy"))
    from toy_server import ToyServer, serving

    loaded = tokenizer()
    path = os.pathsep.join([str(toy_site), *filter(None, [os.environ.get("PYTHONPATH")])])
    with serving(ToyServer(loaded, loaded.eos_token_id, lie=lie)) as url:
        options = (f"--tito-base-url={url}", f"--tito-tokenizer={folder}", "--tito-profile=quick")
        command = ("-m", "pytest", "--pyargs", "tito_conformance", "--tito-backend=toy", *options)
        done = run(
            *command,
            *("-p", "no:cacheprovider", f"--tito-report={tmp_path / 'out'}"),
            cwd=tmp_path,
            environment={"PYTHONPATH": path},
        )
    assert done.returncode == (lie is not None), done.stdout[-3000:] + done.stderr[-1000:]
    assert "does not support grammars" in (tmp_path / "out" / "conformance.json").read_text() or lie
    assert ("test_the_law_holds[rescored]" in done.stdout) == (lie is not None), done.stdout[-3000:]


def test_the_guides_backend_passes_by_the_command(
    folder: str, toy_site: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server's author runs it: nothing is left out, so the status is 0."""
    monkeypatch.syspath_prepend(str(HERE / "toy"))
    from toy_server import ToyServer, serving

    loaded = tokenizer()
    path = os.pathsep.join([str(toy_site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = (
        "-c",
        "from strands_tito.cli import main; main()",
        "conformance",
        "--backend",
        "toy",
        "--profile",
        "quick",
    )
    with serving(ToyServer(loaded, loaded.eos_token_id)) as url:
        done = run(*command, "--base-url", url, "--tokenizer", folder, cwd=here, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_the_server_of_the_page_on_testing_passes_by_the_command(folder: str, here: Path) -> None:
    page = (HERE.parents[1] / "docs" / "testing.md").read_text()
    before, _, rest = page.partition("```python\n")[2].partition("with scripted_server")
    names: dict[str, Any] = {}
    exec(before, names)
    with eval("scripted_server" + rest.partition(" as server:")[0], names) as server:
        done = conformance(server, folder)
    assert done.exit_code == 0, done.output


def test_no_server_a_broken_law_and_a_missing_check_have_statuses_of_their_own(folder: str, here: Path) -> None:
    with served("vllm") as server:
        pass
    absent = conformance(server, folder)
    assert absent.exit_code == 4, absent.output
    assert "EngineConnectionError" in absent.output
    defect = next(defect for defect, _ in all_defects() if defect.name == "echo-edited")
    with served("sglang", defect) as server:
        broken = conformance(server, folder)
    assert broken.exit_code == 1, broken.output


def test_a_run_can_keep_going_after_a_broken_law(folder: str, here: Path) -> None:
    defect = next(defect for defect, _ in all_defects() if defect.name == "logprobs-shifted")
    with served("vllm", defect) as server:
        done = conformance(server, folder, "--keep-going", "--report", "out")
    assert done.exit_code == 1, done.output
    report = json.loads((here / "out" / "conformance.json").read_text())
    assert len(report["findings"]) > 1
    placed = [each for each in report["findings"] if each["where"]["request_id"]]
    assert len(placed) > 1
    for each in placed:
        [body] = each["bodies"].values()
        assert each["where"]["request_id"] in json.dumps(body)
    assert {check["check"] for check in report["checks"] if check["verdict"] == "broken"} >= {"rescored"}
    assert report["sent"]["top_k"]
    assert report["scored_nats"] > report["tolerance_nats"]
    assert f"{report['scored_nats']:.2g} nats" in words(done)
    assert "Against what each column" in words(done)


def test_a_key_that_a_server_repeats_is_in_no_report(folder: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-5ecret-of-the-operator"
    monkeypatch.setenv("TITO_API_KEY", key)
    halved = next(defect for defect, _ in all_defects() if defect.name == "text-halved")

    def edit(view: Any, request: Any) -> None:
        assert halved.edit is not None
        halved.edit(view, request)
        view.answer["note"] = request.headers["authorization"]

    with served("sglang", replace(halved, edit=edit)) as server:
        done = conformance(server, folder, "--report", "out")
    assert done.exit_code == 1, done.output
    report = (here / "out" / "conformance.json").read_text()
    assert "Bearer <API key>" in report
    assert not any(key in text for text in (done.output, report, (here / "out" / "conformance.html").read_text()))
