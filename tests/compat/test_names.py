"""The names and modules that the READMEs and examples of strands-sglang and strands-vllm, and strands-env, import."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import tito_sglang
import tito_vllm
from tito_compat import ALIASES
from tito_core.hooks import LoopLimiter, ToolCallGuard

NAMES = {
    "tito_sglang": (
        "LoopLimiter MaxMessagesReachedError MaxToolCallsReachedError MaxToolIterationsReachedError Rollout "
        "SGLangClient SGLangModel TokenManager ToolIterationLimiter ToolLimiter get_client get_client_from_slime_args "
        "get_tokenizer"
    ),
    "tito_sglang.client": "SGLangClient",
    "tito_sglang.tool_limiter": "ToolIterationLimiter",
    "tito_sglang.tool_parser": "HermesToolCallParser",
    "tito_sglang.tool_parsers": "HermesToolParser QwenXMLToolParser ToolParser get_tool_parser",
    "tito_vllm": "Token TokenManager VLLMModel VLLMTokenRecorder VLLMToolValidationHooks",
    "tito_vllm.spans": "emit_spans attributes_of",
}


def test_every_alias_is_here() -> None:
    assert NAMES.keys() - {"tito_sglang", "tito_vllm"} == ALIASES.keys()


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_the_names_of_the_peers(module: str) -> None:
    found = importlib.import_module(module)
    for name in NAMES[module].split():
        assert getattr(found, name) is not None
        assert module in ALIASES or name in dir(found)
    assert found is importlib.import_module(ALIASES.get(module, module))


def test_older_names_are_the_same_classes() -> None:
    assert tito_sglang.ToolLimiter is LoopLimiter
    assert tito_vllm.VLLMToolValidationHooks is ToolCallGuard
    assert tito_sglang.TokenManager is tito_sglang.Rollout
    assert tito_vllm.TokenManager is not tito_sglang.TokenManager


@pytest.mark.parametrize(("package", "name"), [(tito_sglang, "SGLangHTTPError"), (tito_vllm, "VLLMModelConfig")])
def test_a_name_that_is_not_here_says_where_to_look(package: object, name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*docs/migrating\.md"):
        getattr(package, name)


def test_a_module_that_is_not_here_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("tito_sglang.nothing")
    assert raised.value.name == "tito_sglang.nothing"


def test_importing_the_packages_imports_no_heavy_package() -> None:
    code = "import sys, tito_sglang, tito_vllm; print({'strands', 'pydantic', 'transformers'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"
