"""What goes out with a release: addresses, versions of Python, workflows, the commit hook, the catalogue's entry."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from strands_tito.collect import folder
from strands_tito.export import parquet
from support.pages import TEXT
from tito_core.parsing import registry
from tito_core.store import frames

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
OWNER = PROJECT["urls"]["Repository"].split("/")[3]
FILES = sorted(
    path
    for pattern in ("*", ".github/**/*", "docs/**/*", "src/**/*", "tools/*", "examples/**/*", "evidence/*.md")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in ("", ".cff", ".ipynb", ".md", ".py", ".toml", ".yaml", ".yml")
)
ADDRESS = re.compile(r"https?://[\w./-]*strands[-_]tito[\w./-]*")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def addresses(root: Path) -> set[str]:
    texts = [(root / path.relative_to(ROOT)).read_text(encoding="utf-8") for path in FILES]
    return {found for text in texts for found in ADDRESS.findall(text)}


def ours(owner: str) -> tuple[str, ...]:
    repository = f"{owner}/strands-tito"
    github = (f"https://github.com/{repository}", f"https://raw.githubusercontent.com/{repository}/")
    return (*github, f"https://{owner}.github.io/strands-tito/")


def test_one_command_puts_the_owner_into_every_address(tmp_path: Path) -> None:
    assert {each for each in addresses(ROOT) if not each.startswith(ours(OWNER))} == set()
    for path in FILES:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for owner in ("acme-2", "renamed"):  # the second time from the first owner
        subprocess.run(["make", "-s", "publish-as", f"OWNER={owner}"], cwd=tmp_path, check=True, timeout=60)
        assert {each for each in addresses(tmp_path) if not each.startswith(ours(owner))} == set()
    assert len(addresses(tmp_path)) == len(addresses(ROOT)) > 8
    assert subprocess.run(["make", "-s", "publish-as"], cwd=tmp_path, capture_output=True).returncode != 0


def test_the_readmes_links_work_in_a_clone_and_in_the_package() -> None:
    """What the build makes of them is seen again in the wheel, by tools/package.py."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    local = [each for each in re.findall(r"\]\(([^)\s]+)\)", text) if not each.startswith("https://")]
    assert len(local) > 10
    assert [each for each in local if not (ROOT / each.partition("#")[0]).is_file()] == []
    for rule in CONFIG["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    places = (f"https://github.com/{OWNER}/strands-tito/blob/main/", f"https://raw.githubusercontent.com/{OWNER}/")
    assert [each for each in targets if not each.startswith("https://")] == []
    assert [each.split("/main/")[1] for each in targets if each.startswith(places)] == local


def test_a_package_with_a_placeholder_for_its_owner_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    script = shutil.copy(ROOT / "tools/package.py", tmp_path / "tools")
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").replace(f"/{OWNER}/", "/OWNER/")
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, script, "--to-publish"], capture_output=True, text=True)
    assert (done.returncode, "make publish-as OWNER=name" in done.stderr) == (1, True)
    release = [(ROOT / each).read_text(encoding="utf-8") for each in (".github/workflows/release.yml", "Makefile")]
    assert ["package PACKAGE_ARGS=--to-publish" in text for text in release] == [True, True]


def test_one_range_of_python_is_stated_everywhere() -> None:
    named = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)]
    first, last = named[0], named[-1]
    assert PROJECT["requires-python"] == f">={first},<3.{int(last[2:]) + 1}"
    assert yaml.safe_load(WORKFLOWS[-1].read_text())["jobs"]["make"]["strategy"]["matrix"]["python"] == named
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "docs/quickstart.md"):
        stated = re.search(r"Python (3\.\d+) to (3\.\d+)", (ROOT / name).read_text(encoding="utf-8"))
        assert stated is not None, name
        assert stated.groups() == (first, last), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_rights_are_named(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"uses: (?!\./|[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$)(.*)$", text, re.MULTILINE) == []
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"run: make ([a-z-]+)", text) + re.findall(r"target: \[?(\w+)", text)
    assert targets or "uses: ./" in text
    assert [each for each in targets if f"\n{each}: " not in makefile] == []


@pytest.mark.parametrize(
    ("message", "fits"),
    [
        ("fix(http): close waits for aborts\n\nWhy.\n", True),
        ("feat!: one name\n", True),
        ("Merge branch 'other'\n", True),
        ("perf: " + "x" * 65, True),
        ("perf: " + "x" * 66, False),
        ("a change\n\nfix: not here\n", False),
        ("fix:no blank\n", False),
        ("wip: later\n", False),
    ],
)
def test_the_commit_hook_knows_a_conventional_subject(message: str, fits: bool) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (hook,) = [each for each in config["repos"][0]["hooks"] if each["id"] == "commit-message"]
    assert (hook["language"], hook["args"], hook["stages"]) == ("pygrep", ["--multiline", "--negate"], ["commit-msg"])
    assert (re.search(hook["entry"].encode(), message.encode(), re.DOTALL | re.MULTILINE) is not None) == fits


def test_the_changelog_begins_with_the_release_that_clones_without_tags_have() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["version"]
    headings = re.findall(
        r"^## \[([\d.]+)\] - (?:unreleased|20\d\d-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert build["fallback-version"] == f"{headings[0]}.dev0"
    assert headings[-1] == "0.3.0"


def test_the_stability_page_names_the_schemas_and_entry_points_of_the_code() -> None:
    text = TEXT[Path("docs/stability.md")]
    schemas = re.findall(r"^\| [^|]*\]\((\w+)\.md#[\w-]+\)[^|]*\| (\d+) \|$", text, re.MULTILINE)
    assert schemas == [
        ("files", str(frames.SCHEMA)),
        ("trainers", str(parquet.SCHEMA)),
        ("collect", str(folder.SCHEMA)),
    ]
    groups = {each for each in PROJECT["entry-points"] if each.startswith("tito.")} | {registry.ENTRY_POINT_GROUP}
    assert set(re.findall(r"^\| `(tito\.\w+)` \|", text, re.MULTILINE)) == groups


def test_the_catalogues_entry_has_the_fields_that_its_schema_takes() -> None:
    """`catalogEntrySchema` of site/src/content.config.ts in strands-agents/harness-sdk; others fail its build."""
    entry = yaml.safe_load((ROOT / "docs/strands-catalogue.yaml").read_text(encoding="utf-8"))
    given = {"name", "description", "integrationType", "languages", "github", "docsUrl", "addedDate"}
    assert set(entry) == given
    assert (entry["integrationType"], entry["languages"]) == (
        "model-provider",
        {"python": {"package": PROJECT["name"]}},
    )
    assert [entry[key].startswith(ours(OWNER)) for key in ("github", "docsUrl")] == [True, True]
