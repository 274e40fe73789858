"""The names of strands-sglang over a scripted SGLang server."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from typing import Any, cast

import pytest
from strands import Agent
from strands.types.exceptions import ContextWindowOverflowException, EventLoopException, ModelThrottledException

import tito_sglang
from support.byte_level import byte_level
from support.names import client_of, named
from support.scripted import Says, call, engine_of, tokenizer
from tito_compat.sglang_parsers import TOOL_PARSER_REGISTRY, HermesToolParser, get_tool_parser
from tito_conformance.testing import Fault, always
from tito_conformance.testing.sglang_requests import FIELDS
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

USER: Any = [{"role": "user", "content": [{"text": "2 + 3?"}]}]


async def events_of(model: SGLangModel, messages: Any = USER) -> list[Any]:
    return [event async for event in model.stream(messages)]


def test_every_name_and_module_can_be_imported() -> None:
    for name in tito_sglang.__all__:
        assert getattr(tito_sglang, name) is not None
    assert set(tito_sglang.__all__) <= set(dir(tito_sglang))
    assert ToolLimiter is LoopLimiter
    with pytest.raises(AttributeError, match="has no attribute 'SGLangModle'"):
        _ = tito_sglang.SGLangModle


def test_importing_the_packages_imports_no_heavy_package() -> None:
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


async def test_an_answer_ends_at_a_regular_expression() -> None:
    script = Says("Five is 5. More.")
    params = {"stop_regex": "[0-9]+", "stream_interval": 500, "beam_width": 1, "max_new_tokens": 64}
    decode = {"decode": lambda ids: str(tokenizer().decode(list(ids)))}
    model = named("sglang", script, engine=decode, sampling_params=params, stream=True)
    events = await events_of(model)  # type: ignore[arg-type]
    draft = model.ledger[0].draft
    assert (draft.finish, draft.stop) == ("stop", "[0-9]+")
    assert tokenizer().decode(draft.output_ids) == "Five is 5"
    assert [event["messageStop"]["stopReason"] for event in events if "messageStop" in event] == ["stop_sequence"]
    assert draft.sampling["extra"] == {"stop_regex": "[0-9]+", "stream_interval": 500}
    sent = script.requests[0].body["sampling_params"]
    assert (sent["stop_regex"], sent["stream_interval"]) == ("[0-9]+", 500)


def test_every_sampling_parameter_of_sglang_is_known() -> None:
    refusals = {}
    for name in FIELDS:
        try:
            named("sglang", Says(), sampling_params={name: {}})
        except ValueError as error:
            refusals[name] = str(error)
    assert not [name for name, refusal in refusals.items() if "Unknown" in refusal]


async def test_return_logprob_false_scores_no_prompt_and_config_is_returned() -> None:
    model = named("sglang", Says("Five."), return_logprob=False, context_window_limit=500)
    assert model.context_window_limit == 500
    assert model.get_config() == {"return_logprob": False, "context_window_limit": 500}
    await events_of(model)  # type: ignore[arg-type]
    prompt = model.rollout.initial_prompt_length
    assert model.rollout.logprobs[:prompt] == [None] * prompt
    assert None not in model.rollout.logprobs[prompt:]
    model.update_config(sampling_params={"temperature": 0.0}, context_window_limit=400)
    assert model.context_window_limit == 400
    assert model.get_config()["sampling"]["temperature"] == 0.0
    for name, value in (("enable_thinking", False), ("return_logprob", True)):
        with pytest.raises(ValueError, match="make a new model"):
            model.update_config(**{name: value})
    assert model.get_config()["return_logprob"] is False  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"sampling_params": {"temprature": 1}}, "'temprature'.*'temperature'"),
        ({"sampling_parameters": {}}, "'sampling_parameters'.*'sampling_params'"),
        ({"sampling_params": {"n": 2}}, "n=2.*rollouts"),
        ({"sampling_params": {"beam_width": 2}}, "beam_width=2.*rollouts"),
        ({"sampling_params": {"stop_regex": "((("}}, "stop_regex.*not a regular expression"),
        ({"sampling_params": {"watermark": {"key": "k"}}}, "watermark is not supported"),
        ({"sampling_params": {"temperature": -1}}, "temperature.*-1"),
        ({"context_window_limit": 0}, "context_window_limit.*0"),
        ({"sampling": {"top_k": 3}, "sampling_params": {"top_k": 4}}, "sampling_params"),
        ({"base_url": "http://other"}, "'http://other'.*'http://scripted'"),
    ],
)
def test_a_bad_option_is_refused_when_the_model_is_made(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        named("sglang", Says(), **config)


def test_a_template_that_cannot_be_certified_is_refused_when_the_model_is_made() -> None:
    client, broken = client_of(engine_of("sglang", Says())), byte_level(template="{{ 1 }}")
    with pytest.raises(DetectionError):
        SGLangModel(client=client, tokenizer=broken)
    with pytest.raises(TemplateError):
        SGLangModel(client=client, tokenizer=broken, tool_parser=HermesToolParser())
    SGLangModel(client=client, tokenizer=cast(Any, object()), tool_parser="hermes")  # checked at the first turn


async def test_models_of_one_client_share_one_policy_and_one_connect() -> None:
    script = Says("Five.")
    engine = engine_of("sglang", script)
    client = client_of(engine)
    models = [SGLangModel(client=client, tokenizer=tokenizer()) for _ in range(4)]
    assert engine.exchanges == []
    await asyncio.gather(*map(events_of, models))
    assert len({id(model.policy) for model in models}) == 1
    assert [exchange.path for exchange in engine.exchanges].count("/v1/models") == 1
    assert len(script.requests) == 4
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
    assert len(model.rollouts) == 3, "one per agent, although the conversations are equal"


async def test_a_models_errors_are_those_of_strands_or_strands_sglang() -> None:
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
        assert not isinstance(caught.value, ModelThrottledException)  # Strands would retry it
        assert len(model.ledger) == before
    unreachable = SGLangModel(client=SGLangClient("http://127.0.0.1:9", max_retries=0), tokenizer=tokenizer())
    with pytest.raises(SGLangConnectionError):
        await events_of(unreachable)


async def test_an_output_that_the_server_does_not_offer_fails_at_each_turn_until_it_is_left_out() -> None:
    model = named("sglang", Says("Five."), return_routed_experts=(3, 2))
    for _ in range(2):
        with pytest.raises(SGLangClientError, match="--enable-return-routed-experts"):
            await events_of(model)  # type: ignore[arg-type]
    assert not model.is_connected
    model.update_config(return_routed_experts=False)
    await events_of(model)  # type: ignore[arg-type]
    assert model.rollout.routed_experts == []


async def test_the_agent_code_of_slimes_example_runs() -> None:
    """slime's example uses the names `params`, `model_id`, `iteration_count` and `format_request_messages`."""
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


async def test_a_limit_can_be_changed_between_invocations_as_strands_env_does() -> None:
    limiter = tito_sglang.LoopLimiter(max_messages=1)
    agent = Agent(model=named("sglang", Says("Yes.")), hooks=[limiter], callback_handler=None)
    for more in (1, 3):
        with pytest.raises(tito_sglang.MaxMessagesReachedError):
            await agent.invoke_async("Go on.")
        limiter.max_messages = limiter.message_count + more
        if more > 1:
            assert str(await agent.invoke_async("Go on.")).strip() == "Yes."
    assert limiter.message_count == len(agent.messages)


def test_limit_errors_can_be_made_by_hand_and_pickled() -> None:
    for error in (MaxToolIterationsReachedError(10), MaxToolIterationsReachedError("Max reached."), LoopLimitOf(3, 4)):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied), copied.allowed) == (type(error), str(error), error.allowed)
        assert isinstance(error, EventLoopException)
    assert str(MaxToolIterationsReachedError("Max reached.")) == "Max reached."
    assert MaxToolIterationsReachedError(10).reached == 10


LoopLimitOf = tito_sglang.MaxMessagesReachedError


@pytest.mark.parametrize("name", [*TOOL_PARSER_REGISTRY, "deepseek_v32"])
def test_a_parser_by_either_name_is_a_format_of_the_core(name: str) -> None:
    assert get_tool_parser(name).name in known_tool_parsers()


async def test_the_parser_of_a_model_is_the_named_one_or_the_templates() -> None:
    for given in (None, "hermes", HermesToolParser(), get_tool_parser("hermes")):
        model = named("sglang", Says("Five."), tool_parser=given)
        await events_of(model)  # type: ignore[arg-type]
        assert model.policy.detected.name == "hermes"


def test_an_unknown_parser_or_token_is_refused() -> None:
    with pytest.raises(UnknownParserError, match="ToolParser"):
        named("sglang", Says(), tool_parser=object())
    with pytest.raises(KeyError, match=r"'nope'.*hermes"):
        get_tool_parser("nope")
    assert HermesToolParser(think_start_token="<think>").parse(call("add", "{}"))[0].name == "add"
