"""Encoding of rendered text: the tokenizer's own ids, with control ids from the scaffold only (law 6)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from support.budget import examples
from support.byte_level import MARKUP, SPECIAL, byte_level, shared, wrapped
from support.templates import template_of, tokenizer_of
from tito_core.chat import encoder as encoder_module
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.traced import Traced, concat
from tito_core.ledger.provenance import Provenance

CONTROL = (*SPECIAL, *MARKUP)
harmless = st.text(st.characters(exclude_characters="<|>", exclude_categories=["Cs"]), max_size=12)
markup = st.sampled_from([*CONTROL, "<|im_", "start|>", "<", "|>", "think", "</", "tool_call>", "<|im_end|", "\n", " "])
hostile = st.lists(st.one_of(harmless, markup), max_size=4).map("".join)
scaffold = st.lists(st.sampled_from([*CONTROL, "user\n", "\n", "the ", "<", "|>", ">", "<think", "é"]), max_size=4)
Runs = list[tuple[bool, str]]
"""Consecutive runs of (is content, text)."""


def runs_of(content: st.SearchStrategy[str]) -> st.SearchStrategy[Runs]:
    run = st.one_of(st.tuples(st.just(True), content), st.tuples(st.just(False), scaffold.map("".join)))
    return st.lists(run, max_size=6)


def traced(runs: Runs) -> Traced:
    text = concat(Traced.content(text, i) if content else text for i, (content, text) in enumerate(runs))
    return text if isinstance(text, Traced) else Traced.of(text, ())


def written_controls(runs: Runs, control: tuple[str, ...] = CONTROL) -> list[str]:
    """Return the control tokens that lie wholly in scaffold, found the slow, obvious way."""
    characters = [(character, content) for content, text in runs for character in text]
    found, at = [], 0
    while at < len(characters):
        for token in sorted(control, key=len, reverse=True):
            piece = characters[at : at + len(token)]
            if "".join(c for c, _ in piece) == token and not any(content for _, content in piece):
                found.append(token)
                at += len(token)
                break
        else:
            at += 1
    return found


def expected_provenance(tokenizer: Any, ids: list[int], runs: Runs) -> list[Provenance]:
    """Return the provenance of each token, from the bytes that byte-level tokens stand for."""
    of_content = [content for content, text in runs for _ in text.encode()]
    added = tokenizer.added_tokens_decoder
    expected, at = [], 0
    for token in ids:
        length = len(tokenizer.convert_ids_to_tokens(token))  # one character a byte, control tokens in ASCII too
        inside = any(of_content[at : at + length]) and token not in added
        expected.append(Provenance.PROMPT if inside else Provenance.SCAFFOLD)
        at += length
    assert at == len(of_content)
    return expected


@settings(deadline=None, max_examples=100)
@given(runs_of(hostile))
def test_control_ids_come_from_the_scaffold_alone(runs: Runs) -> None:
    tokenizer = shared()
    encoded = ENCODER.encode(traced(runs))
    ids = encoded.ids.tolist()
    added = tokenizer.added_tokens_decoder
    control = [added[i].content for i in ids if i in added]
    assert control == written_controls(runs)
    assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == "".join(text for _, text in runs)
    assert encoded.provenance.tolist() == expected_provenance(tokenizer, ids, runs)


@settings(deadline=None, max_examples=66)
@given(runs_of(harmless))
def test_harmless_content_gives_the_tokenizers_own_ids(runs: Runs) -> None:
    text = "".join(text for _, text in runs)
    if len(written_controls([(False, text)])) == len(written_controls(runs)):
        assert ENCODER.encode(traced(runs)).ids.tolist() == shared().encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-tiny"])
def test_real_tokenizers(name: str) -> None:
    tokenizer = tokenizer_of(name)
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    encoder = template_of(name).encoder
    # SmolLM2's vocabulary lacks some bytes (0x16, 0xF1, ...) and drops them from any text, so none of those here.
    spelled = st.lists(
        st.one_of(st.text("ab é\n42", max_size=5), st.sampled_from(sorted(added.values()))), max_size=4
    ).map("".join)

    @settings(deadline=None, max_examples=examples(60))
    @given(spelled, harmless)
    def check(attack: str, text: str) -> None:
        head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
        ids = encoder.encode(traced([(False, head), (True, attack), (False, tail)])).ids.tolist()
        assert [added[i] for i in ids if i in added] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
        normalizer = tokenizer.backend_tokenizer.normalizer
        shown = normalizer.normalize_str(attack) if normalizer else attack
        assert tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False) == head + shown + tail
        plain = encoder.encode(traced([(False, head), (True, text), (False, tail)])).ids.tolist()
        assert plain == tokenizer.encode(head + text + tail, add_special_tokens=False)

    check()


def test_characters_that_a_normaliser_composes_stay_content() -> None:
    # NFC makes one character of ">" and a content's combining solidus; its tokens hold content.
    encoded = template_of("qwen3-tiny").encoder.encode(traced([(False, "a>"), (True, "\u0338b"), (False, "c")]))
    assert Provenance.PROMPT in encoded.provenance[:3].tolist()
    assert encoded.provenance[1] == Provenance.PROMPT


def test_lone_surrogates_are_replaced() -> None:
    encoded = ENCODER.encode(traced([(False, "a"), (True, "b\ud83dc\udc00"), (False, "d")]))
    assert shared().backend_tokenizer.decode(encoded.ids.tolist()) == "ab\ufffdc\ufffdd"


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
@settings(deadline=None, max_examples=20)
@given(runs=runs_of(st.text(" \nab", max_size=4)))
def test_control_tokens_that_strip_blanks(side: str, runs: Runs) -> None:
    tokenizer, encoder = SWALLOWING[side]
    text = "".join(text for _, text in runs)
    if len(written_controls([(False, text)])) == len(written_controls(runs)):
        encoded = encoder.encode(traced(runs))
        assert encoded.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
        assert len(encoded.provenance) == len(encoded.ids)


def unigram() -> Any:
    pieces = [("<unk>", 0.0), ("<|im_end|>", -1.0), ("<think>", -1.0), *((c, -5.0) for c in "<|>_▁abdehiknmt")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    return backend


def whole_words() -> Any:
    pieces = dict.fromkeys(["<|im_end|>", "<think>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True)
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return backend


def words() -> Any:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<|im_end|>": 1, "<think>": 2, "a": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


@pytest.mark.parametrize("make", [unigram, whole_words, words])
def test_models_whose_vocabulary_holds_control_tokens(make: Any) -> None:
    backend = make()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_end|>",)])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer = wrapped(backend, template="{{ messages }}<think>")
    encoder = ContentSafeEncoder(tokenizer)
    for attack in ("<|im_end|>", "<think>"):
        encoded = encoder.encode(traced([(False, "<|im_end|>"), (True, attack)]))
        assert encoded.ids[0] == backend.token_to_id("<|im_end|>")
        assert backend.token_to_id(attack) not in encoded.ids[1:]
        assert set(encoded.provenance[1:].tolist()) == {Provenance.PROMPT}


def test_a_schema_key_between_the_templates_brackets_is_content() -> None:
    encoded = ENCODER.encode(traced([(False, "<"), (True, "think"), (False, "><think>")]))
    assert sum(i in shared().added_tokens_decoder for i in encoded.ids.tolist()) == 1


@settings(deadline=None, max_examples=33)
@given(runs_of(hostile))
def test_as_template_gives_the_tokenizers_ids_and_content_stays_prompt(runs: Runs) -> None:
    text = "".join(text for _, text in runs)
    encoded = PARITY.encode(traced(runs))
    assert encoded.ids.tolist() == shared().encode(text, add_special_tokens=False)
    from_content = [content for content, text in runs for _ in text.encode()]
    at = 0
    for token, provenance in zip(encoded.ids.tolist(), encoded.provenance.tolist(), strict=True):
        length = len(shared().convert_ids_to_tokens(token))
        assert provenance == (Provenance.PROMPT if any(from_content[at : at + length]) else Provenance.SCAFFOLD)
        at += length


def test_empty_text_has_no_tokens() -> None:
    encoded = ENCODER.encode(Traced.of("", ()))
    assert (encoded.ids.dtype, encoded.provenance.dtype) == ("int32", "uint8")
    assert len(encoded.ids) == len(encoded.provenance) == 0


ENCODER = template_of("byte level").encoder
PARITY = ContentSafeEncoder(shared(), inert=False)
SWALLOWING = {
    side: (tokenizer, ContentSafeEncoder(tokenizer))
    for side in ("lstrip", "rstrip")
    for tokenizer in [byte_level(**{side: True})]
}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=5))
def test_adjacent_spans_are_merged(drawn: list[tuple[int, int]]) -> None:
    at, spans = 0, []
    for gap, length in drawn:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    merged = encoder_module._merged(spans)
    assert {i for a, b in merged for i in range(a, b)} == {i for a, b in spans for i in range(a, b)}
    assert all(one[1] < other[0] for one, other in pairwise(merged))


def test_an_empty_token_between_content_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "abcd"
    encoder = ContentSafeEncoder(shared())
    zero_width = (b"\0" * 12, 3, lambda: (None, [2, 2, 4]))
    monkeypatch.setattr(encoder, "_encoded", lambda _: zero_width)
    one, several = encoder.encode_stretch(text, [(0, 4)]), encoder.encode_stretch(text, [(0, 2), (2, 4)])
    assert one == several
    assert several[1] == bytes([Provenance.PROMPT] * 3)
    apart = encoder.encode_stretch(text, [(0, 1), (3, 4)])[1]
    assert apart[0] == apart[2] == Provenance.PROMPT
