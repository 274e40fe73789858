"""Forced tool calls: sampled under the parser's grammar on both backends, or refused before sending."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import pytest
from pydantic import BaseModel
from strands import Agent, tool
from strands.types.exceptions import EventLoopException

from support.byte_level import byte_level
from support.scripted import BACKENDS, STRANDS, Says, backend_of, call, engine_of, model_of, tokenizer, with_parts
from tito_core import Policy
from tito_core.backend import ProtocolViolationError, UnsupportedByServerError
from tito_core.backend.sampling import Grammar, SamplingParams
from tito_core.backend.values import InvalidValueError
from tito_core.ledger import Provenance, check_ledger
from tito_core.model import TITOModel
from tito_core.parsing import get_tool_parser
from tito_core.parsing.grammar import CallGrammar, NoCallGrammarError
from tito_core.parsing.turn import TurnParser
from tito_core.turn.inputs import OutputConstraint, UnsupportedToolChoiceError

ANY: Any = {"any": {}}
MODELS = ("smollm2", "qwen3-tiny")


class Sum(BaseModel):
    """A sum."""

    total: int


@tool
def look(at: str) -> str:
    """Look.

    Args:
        at: Where.
    """
    return at


@tool
def count(of: str, far: int = 1) -> str:
    """Count.

    Args:
        of: What.
        far: How far.
    """
    return of


SPECS = [look.tool_spec, count.tool_spec]
ASKED: Any = [{"role": "user", "content": [{"text": "Go."}]}]


async def forced(model: Any, choice: Any, specs: Any = SPECS, **options: Any) -> list[Any]:
    return [event async for event in model.stream(ASKED, specs, tool_choice=choice, **options)]


def sent(script: Says) -> dict[str, Any]:
    """Return the structural tag of the last request."""
    [(name, value)] = script.requests[-1].grammar.items()
    assert name == "structural_tag"
    tag = json.loads(value)
    assert tag["type"] == "structural_tag"
    return dict(tag["format"])


def bias(script: Says) -> Any:
    body = script.requests[-1].body
    return body.get("sampling_params", body).get("logit_bias")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_forced_call_is_sampled_under_the_parsers_grammar(kind: str, name: str) -> None:
    script = Says(call("look", '{"at": "x"}'), name=name)
    model = model_of(kind, script, name, sampling={"ignore_eos": True, "min_new_tokens": 5})
    events = await forced(model, {"tool": {"name": "look"}})
    schemas = {spec["name"]: spec["inputSchema"]["json"] for spec in SPECS}
    grammar = get_tool_parser("hermes", tokenizer(name)).call_grammar(schemas, "look")
    assert sent(script) == json.loads(grammar.value)["format"]
    assert (script.requests[-1].ignore_eos, script.requests[-1].min_new_tokens) == (False, 0)
    assert {"messageStop": {"stopReason": "tool_use"}} in events
    [turn] = model.ledger
    assert turn.draft.constrained
    assert set(model.trajectory.provenance[-len(turn.draft.output_ids) :]) == {Provenance.CONSTRAINED}
    assert model.trajectory.loss_mask.sum() == 0
    check_ledger(model.ledger)


NO_CALLS = {"text": "I cannot do that.", "another tool": call("write", "{}"), "thoughts": "<think>look</think>look"}


@pytest.mark.parametrize("answer", NO_CALLS)
@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_forced_call_that_is_no_call_is_refused(kind: str, answer: str) -> None:
    """A server that ignores the grammar, as vLLM does before `</think>` with a reasoning parser."""
    model = model_of(kind, Says(NO_CALLS[answer]))
    with pytest.raises(ProtocolViolationError, match=r"Law 4: a call of look was forced by a grammar, but"):
        await forced(model, {"tool": {"name": "look"}})
    assert len(model.ledger) == 0


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_answer_under_a_json_schema_that_is_no_json_is_refused(kind: str) -> None:
    """A proxy that drops parameters, as LiteLLM's `drop_params` does."""
    sampling: Any = {"grammar": {"kind": "json_schema", "value": '{"type": "object"}'}}
    for answer, is_json in (('{"v": "a\tb", "n": 3}', True), ("It is three.", False), ('{"v": 3', False)):
        model = model_of(kind, Says(answer), sampling=sampling)
        refused = pytest.raises(ProtocolViolationError, match="Law 4: the answer must be JSON")
        with contextlib.nullcontext() if is_json else refused:
            await forced(model, None)
        assert len(model.ledger) == int(is_json)


async def test_a_forced_call_that_is_cut_off_or_malformed_is_an_answer() -> None:
    for answer in (f"{call('look', '{')[:30]}...", call("look", "{broken")):
        model = model_of("vllm", Says(answer), sampling={"max_new_tokens": 10 if answer.endswith("...") else 60})
        await forced(model, {"tool": {"name": "look"}})
        assert len(model.ledger) == 1


@pytest.mark.parametrize("kind", BACKENDS)
async def test_any_tool_may_be_called_and_auto_forces_none(kind: str) -> None:
    script = Says(call("look", '{"at": "x"}'))
    model = model_of(kind, script)
    await forced(model, ANY)
    assert all(f'"name": "{name}"' in json.dumps(sent(script)).replace('\\"', '"') for name in ("look", "count"))
    for choice in ({"auto": {}}, None):
        await forced(model, choice)
        assert not script.requests[-1].grammar
    assert [turn.draft.constrained for turn in model.ledger] == [True, False, False]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_control_tokens_are_kept_out_of_the_arguments(kind: str) -> None:
    script = Says(call("look", '{"at": "x"}'), name="qwen3-tiny")
    model = model_of(kind, script, "qwen3-tiny", sampling={"extra": {"logit_bias": {"5": 1.5, "151657": 3.0}}})
    await forced(model, ANY)
    added = tokenizer("qwen3-tiny").added_tokens_decoder.items()
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    avoided = [str(token) for token, what in added if what.special or what.content in tags]
    assert bias(script) == {"5": 1.5} | dict.fromkeys(avoided, -100.0)
    await forced(model, None)
    assert bias(script) == {"5": 1.5, "151657": 3.0}
    plain = Says(call("look", '{"at": "x"}'))
    await forced(model_of(kind, plain), ANY)
    assert set(bias(plain)) == set(map(str, tokenizer().all_special_ids)) | {
        str(token) for token, what in tokenizer().added_tokens_decoder.items() if what.special
    }


@pytest.mark.parametrize(
    ("parser", "choice", "specs", "why"),
    [
        ("gemma4", ANY, SPECS, "cannot be forced in this format"),
        ("gpt_oss", ANY, SPECS, "cannot be forced with the parser 'gpt_oss'"),
        ("pythonic", ANY, SPECS, "cannot be forced with a pythonic parser"),
        ("hermes", {"tool": {"name": "find"}}, SPECS, "'find'. Available: count, look"),
        ("hermes", ANY, None, "no tools"),
    ],
)
async def test_a_call_that_cannot_be_forced_is_refused_before_it_is_sent(
    parser: str, choice: Any, specs: Any, why: str
) -> None:
    script = Says("Never.")
    model = model_of("vllm", script)
    model = with_parts(model, parser=get_tool_parser(parser, tokenizer()))
    with pytest.raises(UnsupportedToolChoiceError, match=f"tool_choice: .*{why}"):
        await forced(model, choice, specs)
    assert script.requests == []
    assert len(model.ledger) == 0


@pytest.mark.parametrize("keeps_tools", [True, False])
@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_agents_structured_output_is_a_forced_call_on_one_branch(
    kind: str, keeps_tools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strands before 1.62, and 1.62 for a model without this attribute, leaves out all tools but the forced one."""
    monkeypatch.setattr(TITOModel, "_supports_structured_output", keeps_tools)
    script = Says("I think it is 5.", call("Sum", '{"total": 5}'), "Bye.")
    model = model_of(kind, script)
    agent = Agent(model=model, tools=[look, count], callback_handler=None)
    result = await agent.invoke_async("2 + 3?", structured_output_model=Sum)
    assert result.structured_output == Sum(total=5)
    assert '"name": "Sum"' in json.dumps(sent(script)).replace('\\"', '"')
    assert [turn.parent for turn in model.ledger] == [None, 0]
    assert [turn.draft.constrained for turn in model.ledger] == [False, True]
    check_ledger(model.ledger)


@pytest.mark.parametrize("name", ["look", "count"])
async def test_a_forced_call_of_a_tool_that_the_path_does_not_show_opens_anew(name: str) -> None:
    """With `look`, the tool that is forced has another description than the one that the prompt shows."""
    model = model_of("vllm", Says("Hi.", call(name, '{"at": "x", "of": "x"}')))
    state: dict[str, Any] = {}
    spec: Any = {**{tool["name"]: tool for tool in SPECS}[name], "description": "Another."}
    async for event in model.stream(ASKED, [look.tool_spec, count.tool_spec][:1], model_state=state):
        assert event
    later: Any = [*ASKED, {"role": "assistant", "content": [{"text": "Hi."}]}, *ASKED]
    async for event in model.stream(later, [spec], tool_choice=ANY, model_state=state):
        assert event
    assert [turn.parent for turn in model.ledger] == [None, None]


@pytest.mark.parametrize("kind", BACKENDS)
async def test_where_no_call_can_be_forced_structured_output_is_bare_json(kind: str) -> None:
    script = Says("I think it is 5.", '{"total": 5}', "Five.", "Five.")
    model = model_of(kind, script)
    model = with_parts(model, parser=get_tool_parser("pythonic", tokenizer()))
    agent = Agent(model=model, tools=[look], callback_handler=None)
    if STRANDS < (1, 62):  # Strands knows no other way than a forced call
        with pytest.raises(EventLoopException, match="cannot be forced with a pythonic parser") as refused:
            await agent.invoke_async("2 + 3?", structured_output_model=Sum)
        assert isinstance(refused.value.__cause__, UnsupportedToolChoiceError)
        assert [turn.draft.constrained for turn in model.ledger] == [False]
        return
    result = await agent.invoke_async("2 + 3?", structured_output_model=Sum)
    assert result.structured_output == Sum(total=5)
    assert script.requests[-1].grammar == {
        "json" if kind == "vllm" else "json_schema": json.dumps(Sum.model_json_schema())
    }
    assert [turn.draft.constrained for turn in model.ledger] == [False, True]
    with pytest.raises(ProtocolViolationError, match="a call of Sum was forced by a grammar, but"):
        await agent.invoke_async("And?", structured_output_model=Sum)


async def test_a_call_is_forced_after_the_reasoning_that_the_prompt_opened() -> None:
    chatml = (
        "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{%- endif %}"
    )
    added = byte_level(template=chatml)
    parser = get_tool_parser("hermes", added)
    tail = added.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    opened = json.loads(parser.call_grammar({"look": {}}, None, tail).value)["format"]
    plain = json.loads(parser.call_grammar({"look": {}}).value)["format"]
    assert opened["elements"][-1] == plain
    closing = {"type": "token", "token": added.convert_tokens_to_ids("</think>")}
    assert opened["elements"][1] == closing
    shape = OutputConstraint(None, Sum)
    answer = shape.sampling(SamplingParams(), parser, {}, tail).grammar
    assert answer is not None
    elements = json.loads(answer.value)["format"]["elements"]
    wide = {**Sum.model_json_schema(), "additionalProperties": True}
    assert [elements[1], elements[-1]["json_schema"]] == [closing, wide]
    assert shape.sampling(SamplingParams(), parser, {}, []).grammar == Grammar(
        kind="json_schema", value=json.dumps(Sum.model_json_schema())
    )


THINK, END_OF_THINK = 151667, 151668
"""`<think>` and `</think>` of qwen3-tiny's tokenizer."""
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template whose generation prompt opens the reasoning, as those of Qwen3.5, GLM-4.6 and Nemotron do."""


def free_or_forced(request: Any) -> Any:
    """Answer as a policy would: under a grammar with the only text that it allows, else freely."""
    return call("look", '{"at": "x"}') if request.grammar else "I would rather chat."


def behind_parser(script: Any, loaded: Any = None, **options: Any) -> tuple[Policy, Any]:
    """Return a policy on a scripted vLLM with `--reasoning-parser qwen3`, and its engine."""
    loaded = loaded or tokenizer("qwen3-tiny")
    engine = engine_of("vllm", script, "qwen3-tiny", reasoning=(THINK, END_OF_THINK), **options)
    return Policy.connect(backend=backend_of(engine, "vllm"), tokenizer=loaded, parser="hermes"), engine


async def test_a_server_with_a_reasoning_parser_applies_the_grammar_from_the_first_token() -> None:
    script = Says(free_or_forced, name="qwen3-tiny")
    policy, _ = behind_parser(script)
    assert policy.info.capabilities.grammar_from_first_token is True
    model = policy.model()
    await forced(model, {"tool": {"name": "look"}})
    assert script.requests[-1].body["reasoning_ended"] is True
    [turn] = model.ledger
    assert turn.draft.constrained
    assert [one.name for one in turn.draft.calls] == ["look"]
    await forced(model, None)
    assert "reasoning_ended" not in script.requests[-1].body, "nothing to tell without a grammar"


GRAMMARS: dict[str, dict[str, str]] = {
    "json_schema": {"kind": "json_schema", "value": '{"type": "object"}'},
    "regex": {"kind": "regex", "value": "yes|no"},
    "ebnf": {"kind": "ebnf", "value": 'root ::= "yes"'},
}


async def test_a_server_that_cannot_be_told_is_refused_a_grammar() -> None:
    """`/v1/completions` has no field for it: the answer would be free, and recorded as constrained."""
    script = Says(free_or_forced, name="qwen3-tiny")
    policy, engine = behind_parser(script, scale_out=False)
    assert policy.info.capabilities.grammar_from_first_token is False
    before = len(engine.requests)

    refused = r"without its reasoning parser.*--enable-scale-out"
    with pytest.raises(UnsupportedByServerError, match=refused):
        await forced(policy.model(), {"tool": {"name": "look"}})
    for grammar in GRAMMARS.values():
        with pytest.raises(UnsupportedByServerError, match=refused):
            policy.model(sampling={"grammar": grammar})
    model = policy.model()
    with pytest.raises(UnsupportedByServerError, match="was not sent"):
        await forced(model, None, structured_output_model=Sum)
    assert (len(model.ledger), len(engine.requests)) == (0, before)
    await forced(model, None)
    assert not model.ledger[0].draft.constrained


async def test_a_grammar_of_the_answer_begins_after_reasoning_that_the_template_opened() -> None:
    loaded = copy.deepcopy(tokenizer("qwen3-tiny"))
    loaded.chat_template = OPENS
    script = Says("Let me see.</think>yes", name="qwen3-tiny")
    policy, _ = behind_parser(script, loaded)
    for kind, value in (("json_schema", "json_schema"), ("regex", "pattern"), ("ebnf", "grammar")):
        given = GRAMMARS[kind]
        model = policy.model(sampling={"grammar": given})
        await forced(model, None, None)
        *thinking, answer = sent(script)["elements"]
        assert {"type": "token", "token": END_OF_THINK} in thinking
        if kind == "json_schema":
            assert json.loads(given["value"]).items() <= answer[value].items()
        else:
            assert answer[value] == given["value"]
        [turn] = model.ledger
        assert turn.draft.constrained, "the reasoning, too, is sampled under the grammar"
        assert turn.draft.reasoning_closed
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "</think>yes"}}
    await forced(policy.model(sampling={"grammar": {"kind": "structural_tag", "value": json.dumps(tag)}}), None, None)
    assert sent(script) == tag["format"], "it is the whole completion"


def test_a_schema_that_is_not_json_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"grammar\.value is not JSON"):
        SamplingParams(grammar=Grammar(kind="json_schema", value="{"))


class Thinks(TurnParser):
    """A parser whose grammar of an answer depends on the last ids of the prompt."""

    def __init__(self) -> None: ...

    def call_grammar(self, *_: Any) -> CallGrammar:
        raise NoCallGrammarError("no grammar")

    def answer_grammar(self, schema: Any, tail: Any) -> CallGrammar:
        return CallGrammar("structural_tag", json.dumps([schema, list(tail)]), (5,))


@pytest.mark.parametrize("choice", [None, {"auto": {}}, {"tool": {"name": "Sum"}}])
def test_a_schema_after_reasoning_is_forced_by_the_parser(choice: Any) -> None:
    grammar = OutputConstraint(choice, Sum).sampling(SamplingParams(), Thinks(), {}, [1, 2]).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.avoided_ids) == ("structural_tag", (5,))
    assert json.loads(grammar.value) == [Sum.model_json_schema(), [1, 2]]
