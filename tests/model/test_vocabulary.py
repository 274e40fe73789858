"""Law 15 at connect: the tokenizer is compared with the server's, and every ledger records how."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.byte_level import MARKUP, SPECIAL, byte_level
from support.scripted import BACKENDS, Says, backend_of, engine_of, policy_of, tokenizer
from tito_conformance.testing import ScriptedEngine
from tito_core import Policy, store
from tito_core.chat.template import ChatTemplate
from tito_core.chat.traced import Traced
from tito_core.ledger import LawViolationError, Ledger, VocabularyCheck
from tito_core.vocabulary import ORDINARY

Encode = Callable[[str, bool], Sequence[int]]


@cache
def small() -> Any:
    return byte_level()


def encoder(loaded: Any) -> Encode:
    return lambda text, special: loaded.encode(text, add_special_tokens=special)


def served(kind: str, encode: Encode | None, **options: Any) -> ScriptedEngine:
    size = {"vocab_size": len(small()), "eos_ids": [small().eos_token_id]}
    return engine_of(kind, Says(""), **{**size, "encode": encode, **options})


def connected(engine: ScriptedEngine, kind: str, **options: Any) -> Policy:
    return Policy.connect(**{"backend": backend_of(engine, kind), "tokenizer": small(), **options})


def refusal(kind: str, encode: Encode | None, **options: Any) -> str:
    with pytest.raises(LawViolationError) as raised:
        connected(served(kind, encode, **options), kind)
    assert raised.value.law == 15
    assert "Use the tokenizer of the served model" in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_same_tokenizer_is_compared_and_every_ledger_records_it(
    kind: str, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    with caplog.at_level(logging.WARNING, "tito_core"):
        policy = connected(served(kind, encoder(small())), kind, store=tmp_path / "rollouts.tito")
    assert policy.vocabulary is VocabularyCheck.TOKENIZE
    assert caplog.records == []
    assert policy.ledger().header.vocabulary is VocabularyCheck.TOKENIZE
    assert policy.model().ledger.header.vocabulary is VocabularyCheck.TOKENIZE
    ledger = policy.model().ledger
    ledger.annotate("reward", 1.0)
    policy.store.close()  # type: ignore[union-attr]
    assert [kept.header.vocabulary for kept in store.read(tmp_path / "rollouts.tito")] == [VocabularyCheck.TOKENIZE]


def test_a_servers_bos_is_no_difference() -> None:
    def with_bos(text: str, special: bool) -> list[int]:
        return [0] * special + list(small().encode(text, add_special_tokens=False))

    assert connected(served("vllm", with_bos), "vllm").vocabulary is VocabularyCheck.TOKENIZE


def test_another_models_tokenizer_is_refused_with_the_text_and_both_ids() -> None:
    message = refusal("sglang", encoder(tokenizer("smollm2")))
    assert repr(ORDINARY[0]) in message
    for loaded in (small(), tokenizer("smollm2")):
        assert ", ".join(map(str, loaded.encode(ORDINARY[0], add_special_tokens=False)[:4])) in message
    assert "'scripted'" in message
    assert len(message) < 700


def swapped(one: int, other: int) -> Encode:
    """Return the same tokenizer with two ids exchanged."""
    exchanged = {one: other, other: one}
    return lambda text, special: [
        exchanged.get(token, token) for token in small().encode(text, add_special_tokens=special)
    ]


@cache
def used_ids() -> list[int]:
    """Return the ids of ordinary texts, and of every control token that the template writes."""
    ordinary = {token for text in ORDINARY for token in small().encode(text, add_special_tokens=False)}
    written = {small().convert_tokens_to_ids(text) for text in (*MARKUP, *SPECIAL[1:]) if text in small().chat_template}
    return sorted(ordinary | written)


@settings(max_examples=25)
@given(st.data())
def test_two_exchanged_ids_are_refused(data: st.DataObject) -> None:
    one = data.draw(st.sampled_from(used_ids()))
    other = data.draw(st.integers(0, len(small()) - 1).filter(lambda token: token != one))
    kind = data.draw(st.sampled_from(BACKENDS))
    message = refusal(kind, swapped(one, other))
    assert str(one) in message
    assert str(other) in message


@pytest.mark.parametrize("missing", ["<|im_start|>", "<|im_end|>", "<tool_call>", "<tool_response>"])
def test_a_server_that_lacks_a_control_token_of_the_template_is_refused(missing: str) -> None:
    less = byte_level(
        tuple(text for text in MARKUP if text != missing), special=tuple(text for text in SPECIAL if text != missing)
    )
    refusal("vllm", encoder(less))


def test_a_server_that_lacks_a_control_token_of_the_parser_alone_is_refused() -> None:
    ours, theirs = byte_level((*MARKUP, "[TOOL_CALLS]")), byte_level()
    engine = served("sglang", encoder(theirs), vocab_size=len(ours))
    assert connected(engine, "sglang", tokenizer=ours).vocabulary is VocabularyCheck.TOKENIZE
    with pytest.raises(LawViolationError) as raised:
        connected(engine, "sglang", tokenizer=ours, parser="mistral")
    assert raised.value.law == 15


def test_an_answer_ends_where_the_template_ends_a_turn_and_at_the_end_of_sequence() -> None:
    loaded = byte_level((*MARKUP, "<end>"), names={"eos_token": "<end>"})
    policy = connected(served("vllm", encoder(loaded), vocab_size=len(loaded)), "vllm", tokenizer=loaded)
    assert set(policy.stop_token_ids) == {loaded.convert_tokens_to_ids(each) for each in ("<|im_end|>", "<end>")}


@pytest.mark.parametrize(
    "used",
    [{"padding": True}, {"padding": "max_length", "max_length": 50}, {"truncation": True, "max_length": 3}],
    ids=["padded", "padded to a length", "truncated"],
)
def test_what_a_tokenizer_did_before_is_no_difference(used: dict[str, Any]) -> None:
    """Transformers keeps the last call's padding and truncation in the tokenizer."""
    loaded = byte_level()
    fresh = connected(served("vllm", encoder(byte_level())), "vllm", tokenizer=loaded)
    loaded(["one", "one and two and three"], **used)
    again = connected(served("vllm", encoder(byte_level())), "vllm", tokenizer=loaded)
    assert again.template.certificate == fresh.template.certificate
    assert again.model(ledger=fresh.model().ledger).policy is again


def test_added_tokens_that_text_becomes_must_be_the_servers() -> None:
    """The model may have rows for them, which were never trained."""
    more = byte_level((*MARKUP, "EURUSD", "GBPJPY"))
    sizes = {"vocab_size": len(more) + 64}
    with pytest.raises(LawViolationError, match="EURUSD GBPJPY") as raised:
        connected(served("sglang", encoder(small()), **sizes), "sglang", tokenizer=more)
    assert raised.value.law == 15
    policy = connected(served("sglang", encoder(more), **sizes), "sglang", tokenizer=more)
    assert policy.vocabulary is VocabularyCheck.TOKENIZE


def test_where_content_may_become_control_tokens_all_of_them_must_be_the_servers() -> None:
    more = byte_level((*MARKUP, "<|fim_prefix|>"))
    engine = served("vllm", encoder(small()), vocab_size=len(more))
    assert connected(engine, "vllm", tokenizer=more).vocabulary is VocabularyCheck.TOKENIZE
    with pytest.raises(LawViolationError, match=rf"gives \[{more.convert_tokens_to_ids('<|fim_prefix|>')}, "):
        connected(engine, "vllm", tokenizer=more, content_tokens="as-template")


CLOSED = [{"encode": None}, {"skip_tokenizer_init": True, "encode": None}]
EXPECTED = {"vllm": VocabularyCheck.NOT_CHECKED, "sglang": VocabularyCheck.VOCAB_SIZE}


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("closed", CLOSED)
def test_a_server_without_tokenize_is_recorded_as_not_checked(
    kind: str, closed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tito_core"):
        policy = connected(served(kind, **closed), kind)
    assert policy.vocabulary is EXPECTED[kind], "SGLang tells how many rows its embedding has"
    assert policy.ledger().header.vocabulary is EXPECTED[kind]
    records = [record for record in caplog.records if record.name == "tito_core.vocabulary"]
    assert [record.levelno for record in records] == [logging.WARNING]
    assert str(EXPECTED[kind]) in records[0].getMessage()


@pytest.mark.parametrize("more", [0, 1, 5000])
def test_sizes_refuse_a_server_with_too_few_rows_and_allow_padding(more: int) -> None:
    rows = len(small()) + more
    assert connected(served("sglang", None, vocab_size=rows), "sglang").vocabulary is VocabularyCheck.VOCAB_SIZE
    refusal("sglang", None, vocab_size=len(small()) - 1)
    loaded = tokenizer("smollm2")  # whose control tokens have its smallest ids
    with pytest.raises(LawViolationError, match=f"model has {len(loaded) - 1} rows") as raised:
        connected(
            served("sglang", None, vocab_size=len(loaded) - 1, eos_ids=[loaded.eos_token_id]),
            "sglang",
            tokenizer=loaded,
        )
    assert raised.value.law == 15


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_server_that_reads_control_tokens_as_text_is_checked_on_text(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in vLLM's Mistral mode, whose API encodes no control tokens."""
    inert = ChatTemplate.of(small()).encoder

    def as_text(text: str, special: bool) -> list[int]:
        return inert.encode(Traced.content(text, 0)).ids.tolist()

    with caplog.at_level(logging.WARNING, "tito_core"):
        for content_tokens in ("inert", "as-template"):
            policy = connected(served(kind, as_text), kind, content_tokens=content_tokens)
            assert policy.vocabulary is EXPECTED[kind]
    assert any("reads control tokens as text" in record.getMessage() for record in caplog.records)
    refusal(kind, lambda text, special: [token + 1 for token in as_text(text, special)])


def test_a_policy_that_was_made_by_hand_is_not_checked() -> None:
    policy = policy_of("vllm")
    bare = Policy(policy.backend, policy.info, policy.tokenizer, policy.template, policy.parser, policy.detected, (2,))
    assert bare.ledger().header.vocabulary is VocabularyCheck.NOT_CHECKED
    assert isinstance(bare.ledger(), Ledger)
