"""Units of the parsers: forced calls, errors, cursors and Python literals at their ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers import models as models_of

from parsing.families import CALL, CALL_FAMILIES
from support.byte_level import byte_level, wrapped
from tito_core.parsing import get_tool_parser
from tito_core.parsing.call_values import Malformed, PythonReader, shortened
from tito_core.parsing.completion import Completion, Cursor
from tito_core.parsing.markup import DecodedIds, Markup, decoding
from tito_core.parsing.turn import THINK


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "glm45", "glm47", "minimax_m2"])
def test_a_forced_call_is_written_as_the_family_writes_it(name: str) -> None:
    """The constants of the grammar, joined, are the rendered call without its values."""
    parser = get_tool_parser(name, CALL_FAMILIES[name].tokenizer(False))
    closed = {"type": "object", "required": ["ä", "ö"], "additionalProperties": False}
    tool = {**closed, "properties": {"ä": {"type": "integer"}, "ö": {"type": "integer"}}}
    grammar = json.loads(parser.call_grammar({"schön": tool}, "schön").value)
    found = "".join(constants(grammar))
    written = CALL_FAMILIES[name].render([("schön", {"ä": 1, "ö": 2})])
    for value in ('{"ä": 1, "ö": 2}', "1", "2"):
        written = written.replace(value, "")
    assert found.split() == written.split()
    if name in ("glm45", "glm47", "minimax_m2"):  # between the arguments it matters
        assert found.replace("\n\n", "\n").strip() == written.replace("\n\n", "\n").strip()


@pytest.mark.parametrize(
    ("by_token", "form"), [(True, ["schön"]), (False, ["[TOOL_CALLS]", '[{"name": "schön", "arguments": '])]
)
def test_mistral_forces_the_form_that_its_vocabulary_has(by_token: bool, form: list[str]) -> None:
    parser = get_tool_parser("mistral", CALL_FAMILIES["mistral"].tokenizer(by_token))
    assert constants(json.loads(parser.call_grammar({"schön": {}}).value))[: len(form)] == form


@pytest.mark.parametrize("tag", ["<|tool_call|>", "<tool_call>"])
def test_granite_forces_the_tag_that_its_vocabulary_has(tag: str) -> None:
    tokenizer = byte_level((tag,))
    grammar = get_tool_parser("granite", tokenizer).call_grammar({"look": {}}).value
    assert str(tokenizer.convert_tokens_to_ids(tag)) in grammar


def constants(grammar: Any) -> list[str]:
    if isinstance(grammar, list):
        return [text for each in grammar for text in constants(each)]
    if not isinstance(grammar, dict):
        return []
    if grammar.get("type") == "const_string":
        return [grammar["value"]]
    return [text for each in grammar.values() for text in constants(each)]


def test_texts_are_quoted_and_cut_at_their_length() -> None:
    assert shortened("x" * 60) == repr("x" * 60)
    assert shortened("x" * 61) == repr("x" * 60 + "...")
    assert shortened("abc", 2) == "'ab...'"
    assert shortened("ab", 2) == "'ab'"
    assert str(Malformed("Why.", "look")) == "Why."


def cursor(text: str, start: int, stop: int) -> Cursor:
    tokenizer = byte_level(CALL)
    ids = tokenizer.encode(text, add_special_tokens=False)
    markup = Markup(tokenizer, CALL)
    return Cursor(Completion(markup, DecodedIds(markup.decode, ids), False), start, stop)


def test_a_cursor_reads_no_further_than_its_end_and_the_next_tag() -> None:
    import re

    word = re.compile(r"[a-z<>_/]+")
    assert not cursor("abcdef", 0, 3).skip("abcd")
    assert cursor("abcdef", 0, 3).skip("abc")
    assert cursor("abcdef", 0, 3).match(word, "a word") == "abc"
    assert cursor("abc<tool_call>def", 0, 17).match(word, "a word") == "abc"
    with pytest.raises(Malformed, match=r"'5abcdefghijklmnopqrs' .*a word"):
        cursor("5abcdefghijklmnopqrstuvwxyz", 0, 27).match(word, "a word")
    with pytest.raises(Malformed, match=r"'5abc' .*'x'"):
        cursor("5abcdefgh", 0, 4).expect("x")
    with pytest.raises(Malformed, match=r"^The call ends where ' ' belongs\.$"):
        cursor("5abc", 4, 4).expect(" ")
    with pytest.raises(Malformed, match=r"^The call ends where a word belongs\.$"):
        cursor("5abc", 4, 4).match(word, "a word")


def test_a_list_of_python_calls_is_read_up_to_its_stop() -> None:
    for text, stop in (("[f(a=12)]", 7), ("[f(a='x')]", 8), ("[f()]  ", 4), ("[f(a=b)]", 3), ("[f()]", 4)):
        reader = PythonReader(text, 0, stop)
        with pytest.raises(Malformed):
            reader.calls()
        assert reader.at_end, text
    assert [completion.arguments for completion, _ in PythonReader("[f(a=12)]x", 0, 9).calls()] == [{"a": 12}]


@pytest.mark.parametrize(
    ("text", "at_end"),
    [("[f(a='x", True), ('[f(a="x', True), ("[f(a=x y", False), ("[f(a='x' 'y", True), ("[f(a=5;'y", False)],
)
def test_a_list_that_an_open_string_cuts_off_could_go_on(text: str, at_end: bool) -> None:
    reader = PythonReader(text, 0, len(text))
    with pytest.raises(Malformed):
        reader.calls()
    assert reader.at_end == at_end


def test_a_string_that_is_whole_is_not_open() -> None:
    reader = PythonReader("[f('x'", 0, 6)
    with pytest.raises(Malformed, match="a keyword"):
        reader.calls()
    assert not reader.at_end


def fused() -> Any:
    """Return a tokenizer whose decoder joins tokens, and that would remove blanks before a full stop."""
    backend = Tokenizer(models_of.WordLevel({"a": 0, " .": 1, "b": 2}, unk_token="b"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = wrapped(backend, names={"eos_token": "<s>"})
    tokenizer.clean_up_tokenization_spaces = True
    return tokenizer


def test_other_tokenizers_are_decoded_without_clean_up_and_with_special_tokens() -> None:
    assert decoding(fused())([0, 1, 3, 2]) == ("a .<s>b", [0, 1, 3, 6])


def test_a_block_of_reasoning_keeps_its_blanks_and_loses_its_newlines() -> None:
    assert THINK.text_of("\n a X\n\n") == " a X"
    assert THINK.text_of("X\nX") == "X\nX"
