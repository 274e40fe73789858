"""The modules of strands-sglang and strands-vllm, by which users import their names."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

from tito_compat import ALIASES

NAMES = {
    "tito_sglang.client": "DEFAULT_MAX_CONNECTIONS NON_RETRYABLE_STATUS_CODES SGLangClient",
    "tito_sglang.exceptions": (
        "SGLangClientError SGLangHTTPError SGLangContextLengthError SGLangThrottledError SGLangConnectionError "
        "SGLangDecodingError SGLangTimeoutError SGLangServerError SGLangAuthenticationError SGLangBadRequestError"
    ),
    "tito_sglang.limiter": "LoopLimiter LoopLimitReachedError MaxMessagesReachedError ToolLimiter ToolIterationLimiter",
    "tito_sglang.rollout": "Rollout",
    "tito_sglang.sglang": "SGLangModel",
    "tito_sglang.token": "Token TokenManager",
    "tito_sglang.tool_limiter": "MaxToolIterationsReachedError ToolIterationLimiter ToolLimiter",
    "tito_sglang.tool_parser": "UNKNOWN_TOOL_NAME HermesToolCallParser ToolCallParseResult ToolCallParser",
    "tito_sglang.tool_parsers": (
        "TOOL_PARSER_REGISTRY UNKNOWN_TOOL_NAME GLMToolParser HermesToolParser KimiK2ToolParser QwenXMLToolParser "
        "ToolParser ToolParseResult get_tool_parser register_tool_parser"
    ),
    "tito_sglang.tool_parsers.base": "ToolParser ToolParseResult get_tool_parser register_tool_parser",
    "tito_sglang.tool_parsers.glm": "GLMToolParser",
    "tito_sglang.tool_parsers.hermes": "HermesToolParser",
    "tito_sglang.tool_parsers.kimi_k2": "KimiK2ToolParser",
    "tito_sglang.tool_parsers.qwen_xml": "QwenXMLToolParser",
    "tito_sglang.utils": "decode_routed_experts get_client get_client_from_slime_args get_tokenizer",
    "tito_vllm.recorder": "VLLMTokenRecorder",
    "tito_vllm.spans": "emit_spans attributes_of",
    "tito_vllm.token": "Token TokenManager",
    "tito_vllm.tool_validation": "VLLMToolValidationHooks",
    "tito_vllm.vllm": "VLLMModel VLLMModelConfig make_vllm_openai_model",
}


def test_every_alias_is_here() -> None:
    assert NAMES.keys() == ALIASES.keys()


@pytest.mark.parametrize("alias", NAMES)
def test_an_alias_has_the_names_of_the_peers_module(alias: str) -> None:
    module = importlib.import_module(alias)
    assert module is importlib.import_module(ALIASES[alias])
    assert (module.__name__, module.__spec__ and module.__spec__.name) == (ALIASES[alias], ALIASES[alias])
    assert [name for name in NAMES[alias].split() if not hasattr(module, name)] == []


def test_the_same_word_is_another_class_for_each_peer() -> None:
    from tito_compat.rollout import Rollout

    sglang, vllm = (importlib.import_module(f"tito_{kind}.token").TokenManager for kind in ("sglang", "vllm"))
    assert sglang is Rollout
    assert vllm is not Rollout


def test_every_form_of_import_works_in_a_new_process_and_so_do_pickles_by_an_older_path() -> None:
    code = """
import pickle, sys
error = pickle.load(sys.stdin.buffer)
import tito_sglang.tool_parsers.hermes as hermes, tito_vllm.token
from tito_sglang import tool_parsers, client
from tito_sglang.tool_parsers import base
assert error.__name__ == "SGLangHTTPError" and tito_vllm.token.TokenManager
assert hermes.HermesToolParser is tool_parsers.HermesToolParser is base.get_tool_parser("hermes").__class__
try:
    import tito_sglang.nothing
except ModuleNotFoundError as missing:
    print(missing.name, client.SGLangClient.__module__)
"""
    pickled = pickle.dumps(1)[:2] + b"ctito_sglang.exceptions\nSGLangHTTPError\n."
    ran = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=True)
    assert ran.stdout.split() == [b"tito_sglang.nothing", b"tito_compat.sglang_client"]
