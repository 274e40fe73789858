"""A turn's output constraint: a call or a schema that a grammar forces, or none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from tito_core.backend import Grammar, SamplingParams
from tito_core.parsing.grammar import CallGrammar, NoCallGrammarError
from tito_core.parsing.turn import TurnParser
from tito_core.turn.inputs import OutputConstraint, UnsupportedToolChoiceError


class Shape(BaseModel):
    n: int


class Parser:
    """A parser whose calls can be forced, or not."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem, self.calls = problem, ([] if problem is None else None)

    def call_grammar(self, tools: Any, name: Any, tail: Any) -> CallGrammar:
        if self.problem is not None:
            raise NoCallGrammarError(self.problem)
        assert self.calls is not None
        self.calls.append((tools, name, tail))
        return CallGrammar("structural_tag", "{}", (3, 4))


BASE = SamplingParams(temperature=0.5, min_new_tokens=3, ignore_eos=True)
TOOLS: Any = {"look": {"type": "object"}}


def sampled(constraint: OutputConstraint, parser: Any) -> SamplingParams:
    return constraint.sampling(BASE, parser, TOOLS, [1, 2])


@pytest.mark.parametrize(("choice", "name"), [({"any": {}}, None), ({"tool": {"name": "look"}}, "look")])
def test_a_forced_call_is_a_grammar_that_may_end(choice: Any, name: str | None) -> None:
    parser = Parser()
    sampling = sampled(OutputConstraint(choice), parser)
    grammar = Grammar(kind="structural_tag", value="{}", avoided_ids=(3, 4))
    assert sampling == BASE.model_copy(update={"grammar": grammar, "min_new_tokens": 0, "ignore_eos": False})
    assert parser.calls == [(TOOLS, name, [1, 2])]


def test_nothing_is_forced_without_a_constraint() -> None:
    for constraint in (OutputConstraint(), OutputConstraint({"auto": {}})):
        assert sampled(constraint, Parser()) is BASE


def test_a_schema_is_forced_where_a_call_cannot_be() -> None:
    for constraint, parser in (
        (OutputConstraint(None, Shape), Parser()),
        (OutputConstraint({"auto": {}}, Shape), Parser()),
        (OutputConstraint({"tool": {"name": "Shape"}}, Shape), Parser("no grammar")),
    ):
        grammar = sampled(constraint, parser).grammar
        assert grammar is not None
        assert (grammar.kind, grammar.avoided_ids) == ("json_schema", ())
        assert Shape.model_json_schema() == json.loads(grammar.value)


class Thinks(TurnParser):
    """A parser whose grammar of an answer depends on the last ids of the prompt."""

    def __init__(self) -> None: ...

    def call_grammar(self, *_: Any) -> CallGrammar:
        raise NoCallGrammarError("no grammar")

    def answer_grammar(self, schema: Any, tail: Any) -> CallGrammar:
        return CallGrammar("structural_tag", json.dumps([schema, list(tail)]), (5,))


@pytest.mark.parametrize("choice", [None, {"auto": {}}, {"tool": {"name": "Shape"}}])
def test_a_schema_after_reasoning_is_forced_by_the_parser(choice: Any) -> None:
    grammar = sampled(OutputConstraint(choice, Shape), Thinks()).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.avoided_ids) == ("structural_tag", (5,))
    assert json.loads(grammar.value) == [Shape.model_json_schema(), [1, 2]]


def test_a_call_that_cannot_be_forced() -> None:
    with pytest.raises(UnsupportedToolChoiceError) as caught:
        sampled(OutputConstraint({"any": {}}), Parser("This format has no grammar."))
    assert str(caught.value) == "tool_choice: This format has no grammar."
