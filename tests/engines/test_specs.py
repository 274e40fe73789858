"""The two engines of this package: their locks, command lines and stand-ins."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import tito_engines.sglang
import tito_engines.vllm
from tito_engines import EngineSpec, Launch, find, installed
from tito_engines.install import explain
from tito_engines.spec import megabytes, pins

SPECS = [tito_engines.vllm.SPEC, tito_engines.sglang.SPEC]
LOCKS = [(spec, minor) for spec in SPECS for minor in spec.locks]
LAUNCH = Launch(Path("/env/bin/python"), Path("/models/smol"), "smollm2", "127.0.0.1", 8000, ("--seed", "7"))

either = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
each_lock = pytest.mark.parametrize(("spec", "minor"), LOCKS, ids=lambda value: getattr(value, "name", value))


def test_both_are_offered_under_their_names() -> None:
    assert find("vllm") is tito_engines.vllm.SPEC
    assert find("sglang") is tito_engines.sglang.SPEC
    assert {"vllm", "sglang"} <= installed().keys()


@each_lock
def test_every_package_is_pinned_once_and_by_version_only(spec: EngineSpec, minor: str) -> None:
    names = []
    for line in pins(spec.locks[minor]):
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.+]*)", line).groups()  # type: ignore[union-attr]
        names.append(re.sub(r"[-_.]+", "-", name).lower())
        assert name != "torch" or version.endswith("+cpu")
    assert len(names) == len(set(names))
    assert {"torch", "transformers", "tokenizers", "gguf"} <= set(names)
    download, disk = megabytes(spec.locks[minor], "download"), megabytes(spec.locks[minor], "disk")
    assert download is not None
    assert disk is not None
    assert download < disk


@either
def test_there_is_a_lock_for_each_python_that_we_support(spec: EngineSpec) -> None:
    assert sorted(spec.locks) == ["3.11", "3.12", "3.13"]


@either
def test_a_model_that_reads_images_gets_flags_of_its_own(spec: EngineSpec, tmp_path: Path) -> None:
    text = replace(LAUNCH, model_path=tmp_path)
    before, variables = spec.command(text), spec.env(text).keys()
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert not replace(LAUNCH, model_path=tmp_path / "absent").images
    after, more = spec.command(text), spec.env(text).keys() - variables
    added = [word for word in after if word not in before]
    assert (
        added
        == {
            "vllm": ["--limit-mm-per-prompt", '{"image": 8, "video": 0}'],
            "sglang": ["--mm-preprocess-cache-size-mb", "64"],
        }[spec.name]
    )
    assert more == ({"SGLANG_VLM_CACHE_SIZE_MB"} if spec.name == "sglang" else set())


@either
def test_the_command_names_the_model_the_address_and_what_the_user_added(spec: EngineSpec) -> None:
    words = spec.command(LAUNCH)
    assert words[:2] == ["/env/bin/python", "-m"]
    assert words[-2:] == ["--seed", "7"]
    for option, value in [("--host", "127.0.0.1"), ("--port", "8000"), ("--served-model-name", "smollm2")]:
        assert words[words.index(option) + 1] == value
    assert "/models/smol" in words
    assert words[words.index("--dtype") + 1] == "float32"


@either
def test_one_thread_and_no_model_hub(spec: EngineSpec) -> None:
    env = spec.env(LAUNCH)
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_vllm_opens_its_weight_endpoints_only_when_asked() -> None:
    spec = tito_engines.vllm.SPEC
    open_ = Launch(LAUNCH.python, LAUNCH.model_path, "smollm2", "127.0.0.1", 8000, dev_mode=True)
    assert "VLLM_SERVER_DEV_MODE" not in spec.env(LAUNCH)
    assert spec.env(open_)["VLLM_SERVER_DEV_MODE"] == "1"


def test_each_sglang_has_a_rendezvous_of_its_own_in_a_file() -> None:
    """Torch binds a TCP store to all interfaces."""
    methods = [tito_engines.sglang.SPEC.env(LAUNCH)["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] for _ in range(2)]
    assert all(re.fullmatch(r"file:///.+", method) for method in methods)
    assert len(set(methods)) == 2


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """With a torch that takes notes: (namespace, operator) of each declaration."""
    notes: list[tuple[str, str]] = []

    class Library:
        def __init__(self, namespace: str, kind: str) -> None:
            self.namespace = namespace

        def define(self, schema: str) -> None:
            notes.append((self.namespace, schema.partition("(")[0]))

    torch = ModuleType("torch")
    torch.library = type("library", (), {"Library": Library})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return notes


@pytest.fixture
def sgl_kernel(declared: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "tito_engines.sglang_standins.sgl_kernel", raising=False)
    return importlib.import_module("tito_engines.sglang_standins.sgl_kernel")


def test_the_kernel_stand_in_gives_each_request_the_next_slots(sgl_kernel: ModuleType) -> None:
    """Against the oracle written out by hand: two requests, three slots and one."""
    table = np.zeros((4, 6), dtype=np.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        np.array([2, 0]), table, np.array([1, 4]), np.array([4, 5]), np.array([70, 71, 72, 90]), 6
    )
    assert table.tolist() == [[0, 0, 0, 0, 90, 0], [0] * 6, [0, 70, 71, 72, 0, 0], [0] * 6]


def test_other_kernels_can_be_imported_and_not_called(sgl_kernel: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu_and_mul is a compiled kernel"):
        sgl_kernel.silu_and_mul()


def test_operators_that_vision_models_read_are_declared(
    sgl_kernel: ModuleType, declared: list[tuple[str, str]]
) -> None:
    assert declared == [("sgl_kernel", name) for name in sgl_kernel.OPERATORS]
    assert len(declared) == 4


TRITON = """
import triton, triton.language as tl
from triton import Config, knobs
from triton.language.extra.cuda import libdevice
from triton.runtime.jit import JITFunction

@triton.autotune(configs=[Config({"BLOCK": 32}, num_warps=4)], key=["n"])
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def kernel(x, n: tl.constexpr):
    tl.store(x, tl.load(x))

@triton.jit(do_not_specialize=["n"])
def other(n):
    pass

BLOCK = tl.constexpr(64)
assert not isinstance(kernel, JITFunction)
assert (triton.cdiv(7, 2), triton.next_power_of_2(5), triton.next_power_of_2(8)) == (4, 8, 8)
for launch in (lambda: kernel[(1,)](1, 2), lambda: other(3), lambda: triton.runtime.driver):
    try:
        launch()
    except RuntimeError as error:
        print(error)
"""


def test_triton_can_be_imported_and_not_launched() -> None:
    folder = tito_engines.sglang.SPEC.standins[1]
    answer = subprocess.run(
        [sys.executable, "-c", TRITON], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    first, second, third = answer.stdout.splitlines()
    assert first.startswith("The Triton kernel kernel was launched")
    assert second.startswith("The Triton kernel other was launched")
    assert third.startswith("0 active drivers")


def test_torchvision_operators_are_declared_before_it_is_imported(declared: list[tuple[str, str]]) -> None:
    """Torchvision itself is not there."""
    from tito_engines.standins import tito_torchvision_ops  # noqa: F401

    with pytest.raises(ModuleNotFoundError):
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    assert declared == [("torchvision", "nms"), ("torchvision", "qnms")]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "--torch-index URL"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "TITO_CACHE_DIR"),
        ("ConnectionError: Max retries exceeded", "pip's proxy settings"),
        ("ERROR: No matching distribution found for torchvision==0.28.0", "lack a pinned package"),
        ("something else", "Try again"),
    ],
)
def test_a_failed_pip_says_what_to_try(line: str, advice: str) -> None:
    message = explain(tito_engines.vllm.SPEC, "install its packages", 1, ["Collecting x", line])
    assert advice in message
    assert "vLLM 0.32.0" in message
    assert "status 1" in message
    assert line in message
