"""What users of strands-sglang import, over a scripted SGLang: the same calls, and where it breaks, right."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import subprocess
import sys
import threading
from typing import Any, cast

import pytest
from strands import Agent
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException, ModelThrottledException

import tito_sglang
from strands_tito.testing import Fault, always
from support.byte_level import byte_level
from support.names import client_of, named
from support.scripted import Says, call, engine_of, tokenizer
from tito_core.chat.template import TemplateError
from tito_core.hooks import LoopLimiter
from tito_core.parsing import DetectionError, UnknownParserError, known_tool_parsers
from tito_sglang import (
    MaxToolIterationsReachedError,
    SGLangClient,
    SGLangClientError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangHTTPError,
    SGLangModel,
    SGLangThrottledError,
    ToolIterationLimiter,
    ToolLimiter,
)
from tito_sglang.tool_parsers import TOOL_PARSER_REGISTRY, HermesToolParser, ToolParser, get_tool_parser

USER: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]


async def events_of(model: SGLangModel, messages: Any = USER) -> list[Any]:
    return [event async for event in model.stream(messages)]


def test_every_name_is_there_and_importing_the_package_needs_nothing_heavy() -> None:
    for name in tito_sglang.__all__:
        assert getattr(tito_sglang, name) is not None
    assert set(tito_sglang.__all__) <= set(dir(tito_sglang))
    assert ToolLimiter is LoopLimiter
    with pytest.raises(AttributeError, match="has no attribute 'SGLangModle'"):
        _ = tito_sglang.SGLangModle
    modules = ("client", "exceptions", "limiter", "rollout", "sglang", "tool_limiter", "tool_parsers", "utils")
    for module in modules:
        assert importlib.import_module(f"tito_sglang.{module}").__name__ == f"tito_sglang.{module}"


def test_the_packages_alone_import_nothing_of_weight() -> None:
    code = (
        "import sys, tito_sglang, tito_vllm; print({'strands', 'pydantic', 'transformers', 'httpx'} & {*sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


async def test_parameters_by_sglangs_names_are_sent_and_prompts_scored() -> None:
    script = Says("Five.")
    params = {
        "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": None, "stop": "zz", "stop_token_ids": [9],
        "sampling_seed": 3, "skip_special_tokens": False, "no_stop_trim": True, "n": 1,
    }  # fmt: skip
    model = named("sglang", script, sampling_params=params)
    await events_of(model)  # type: ignore[arg-type]
    sent = script.requests[0]
    assert (sent.max_new_tokens, sent.temperature, sent.top_p) == (7, 0.5, 0.9)
    assert 9 in sent.stop_token_ids
    assert model.ledger[0].draft.sampling["seed"] == 3
    assert model.rollout.logprobs[0] is None
    assert None not in model.rollout.logprobs[1:]


async def test_prompts_are_not_scored_on_wish_and_config_is_given_back() -> None:
    model = named("sglang", Says("Five."), return_logprob=False, context_window_limit=500)
    assert model.context_window_limit == 500
    assert model.get_config() == {"return_logprob": False, "context_window_limit": 500}
    await events_of(model)  # type: ignore[arg-type]
    prompt = model.rollout.initial_prompt_length
    assert model.rollout.logprobs[:prompt] == [None] * prompt
    model.update_config(sampling_params={"temperature": 0.0}, context_window_limit=400)
    assert model.context_window_limit == 400
    assert model.get_config()["sampling"]["temperature"] == 0.0
    for change in ({"enable_thinking": False}, {"return_logprob": True}):
        with pytest.raises(ValueError, match="make a new model"):
            model.update_config(**change)
    assert model.get_config()["return_logprob"] is False  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"sampling_params": {"temprature": 1}}, "Did you mean 'temperature'"),
        ({"sampling_parameters": {}}, "Did you mean 'sampling_params'"),
        ({"sampling_params": {"n": 2}}, "make so many rollouts"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"context_window_limit": 0}, "at least 1"),
    ],
)
def test_what_cannot_work_is_refused_where_it_is_written(config: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        named("sglang", Says(), **config)


def test_a_template_that_cannot_be_certified_is_refused_when_the_model_is_made() -> None:
    client, broken = client_of(engine_of("sglang", Says())), byte_level(template="{{ 1 }}")
    with pytest.raises(DetectionError):
        SGLangModel(client=client, tokenizer=broken)
    with pytest.raises(TemplateError):
        SGLangModel(client=client, tokenizer=broken, tool_parser=HermesToolParser())
    SGLangModel(client=client, tokenizer=cast(Any, object()), tool_parser="hermes")  # found out at the first turn


async def test_models_of_one_client_share_one_policy_and_ask_the_server_once() -> None:
    script = Says("Five.")
    engine = engine_of("sglang", script)
    client = client_of(engine)
    models = [SGLangModel(client=client, tokenizer=tokenizer()) for _ in range(8)]
    assert engine.exchanges == []
    await asyncio.gather(*map(events_of, models))
    assert len({id(model.policy) for model in models}) == 1
    assert [exchange.path for exchange in engine.exchanges].count("/v1/models") == 1
    assert len(script.requests) == 8
    other = SGLangModel(client=client, tokenizer=tokenizer(), enable_thinking=False)
    await events_of(other)
    assert other.policy is not models[0].policy


def test_models_are_used_from_threads_with_loops_of_their_own() -> None:
    engine = engine_of("sglang", Says("Five."))
    model = SGLangModel(client=client_of(engine), tokenizer=tokenizer())
    agents = [Agent(model=model, callback_handler=None) for _ in range(3)]
    threads = [threading.Thread(target=agent, args=("2 + 3?",)) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for agent in agents:
        agent("And now?")
    assert len(model.ledger) == 6
    assert len(model.rollouts) == 3  # equal as they are, each agent has its own


async def test_a_models_errors_are_strands_own_or_the_known_ones() -> None:
    full = named("sglang", Says("Five."), context_window_limit=4)
    with pytest.raises(SGLangContextLengthError) as overflow:
        await events_of(full)  # type: ignore[arg-type]
    assert isinstance(overflow.value, ContextWindowOverflowException)  # so that Strands shortens the history
    engine = engine_of("sglang", Says("Five."))
    model = SGLangModel(client=client_of(engine, max_retries=0), tokenizer=tokenizer())
    await events_of(model)
    for status, error in ((429, SGLangThrottledError), (400, SGLangHTTPError)):
        engine.fault = always(Fault(status=status))
        before = len(model.ledger)
        with pytest.raises(error) as caught:
            await events_of(model)
        assert not isinstance(caught.value, ModelThrottledException)  # which Strands would try again
        assert len(model.ledger) == before
    nobody = SGLangModel(client=SGLangClient("http://127.0.0.1:9", max_retries=0), tokenizer=tokenizer())
    with pytest.raises(SGLangConnectionError):
        await events_of(nobody)


async def test_what_the_server_cannot_give_is_told_at_each_turn_by_its_known_name() -> None:
    model = named("sglang", Says("Five."), engine={"experts": (3, 2)}, return_routed_experts=True)
    for _ in range(2):
        with pytest.raises(SGLangClientError, match=r"Give routed_experts=\(layers, experts per token\)"):
            await events_of(model)  # type: ignore[arg-type]
    assert not model.is_connected
    model.update_config(return_routed_experts=(3, 2))
    await events_of(model)  # type: ignore[arg-type]
    assert len(model.rollout.routed_experts) == 1


async def test_slimes_own_agent_code_runs_with_its_old_names() -> None:
    """The names that slime's example types: `params`, `model_id`, `iteration_count`, `format_request_messages`."""
    script = Says(call("add", '{"a": 2, "b": 3}'), call("add", '{"a": 2, "b": 4}'), "Ten.")
    params = {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0}
    model = named("sglang", script, model_id="some", params=params)
    limiter = ToolIterationLimiter(max_iterations=2)

    from strands import tool

    @tool
    def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    agent = Agent(model=model, tools=[add], hooks=[limiter], callback_handler=None, system_prompt="Be brief.")
    with pytest.raises(MaxToolIterationsReachedError):
        await agent.invoke_async("2 + 3?")
    assert limiter.iteration_count == 2
    tm = model.token_manager
    prompt_len = len(tm.segments[0])
    assert len(tm.token_ids) == len(model.trajectory)
    assert sum(tm.loss_mask[prompt_len:]) == sum(tm.loss_mask)
    assert all(isinstance(value, float) for value in tm.logprobs[prompt_len:])
    assert isinstance(model, SGLangModel)
    assert model.tokenizer.decode(tm.token_ids[prompt_len:]).startswith("<tool_call>")
    roles = [message["role"] for message in model.format_request_messages(agent.messages, None)]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]


async def test_a_limit_is_raised_on_the_way_as_strands_env_does() -> None:
    limiter = tito_sglang.LoopLimiter(max_messages=1)
    agent = Agent(model=named("sglang", Says("Yes.")), hooks=[limiter], callback_handler=None)
    for more in (1, 3):
        with pytest.raises(tito_sglang.MaxMessagesReachedError):
            await agent.invoke_async("Go on.")
        limiter.max_messages = limiter.message_count + more
        if more > 1:
            assert str(await agent.invoke_async("Go on.")).strip() == "Yes."
    assert limiter.message_count == len(agent.messages)


async def test_parse_errors_are_counted_by_tool() -> None:
    broken = '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'
    model = named("sglang", Says(broken, broken, "No."))
    await Agent(model=model, callback_handler=None).invoke_async("2 + 3?")
    assert sum(model.tool_parse_errors.values()) == 2
    model.reset()
    assert model.tool_parse_errors == {}


def test_limits_errors_are_made_by_hand_and_pickled() -> None:
    for error in (MaxToolIterationsReachedError(10), MaxToolIterationsReachedError("Max reached."), LoopLimitOf(3, 4)):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.allowed) == (type(error), str(error), error.allowed)
        assert isinstance(error, EventLoopException)
    assert str(MaxToolIterationsReachedError("Max reached.")) == "Max reached."
    assert MaxToolIterationsReachedError(10).reached == 10


LoopLimitOf = tito_sglang.MaxMessagesReachedError


@pytest.mark.parametrize("name", [*TOOL_PARSER_REGISTRY, "deepseek_v32"])
def test_a_parser_by_either_name_is_the_cores(name: str) -> None:
    assert get_tool_parser(name).name in known_tool_parsers()


async def test_the_parser_of_a_model_is_the_named_one_or_the_templates() -> None:
    for given in (None, "hermes", HermesToolParser(), get_tool_parser("hermes")):
        model = named("sglang", Says("Five."), tool_parser=given)
        await events_of(model)  # type: ignore[arg-type]
        assert model.policy.detected.name == "hermes"


def test_a_parser_of_text_is_refused() -> None:
    class Mine(ToolParser):
        name = "mine"

        def parse(self, text: str) -> list[Any]:
            return []

    for parser in (Mine(), object()):
        with pytest.raises(UnknownParserError, match="register its format"):
            named("sglang", Says(), tool_parser=parser)
    with pytest.raises(KeyError, match=r"Unknown tool parser: 'nope'\. Available: .*hermes"):
        get_tool_parser("nope")
    with pytest.raises(ValueError, match="register_format"):
        HermesToolParser(tool_start_token="<function>")
    assert HermesToolParser(think_start_token="<think>").parse(call("add", "{}"))[0].name == "add"
