"""Law 15 on real servers: another tokenizer than the server's is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from support.real import Served
from support.scripted import tokenizer
from tito_core import Policy
from tito_core.ledger import LawViolationError, VocabularyCheck
from tito_core.vocabulary import ORDINARY

pytestmark = pytest.mark.engine


def connected(served: Served, other: Any) -> Policy:
    return Policy.connect(backend=served.kind, base_url=served.url, tokenizer=other, timeout_s=120)


def test_the_servers_own_tokenizer_is_checked(served: Served) -> None:
    assert served.policy.vocabulary is VocabularyCheck.TOKENIZE
    assert served.policy.ledger().header.vocabulary is VocabularyCheck.TOKENIZE


def test_another_models_tokenizer_is_refused(served: Served) -> None:
    with pytest.raises(LawViolationError) as raised:
        connected(served, tokenizer("qwen3-tiny"))
    assert raised.value.law == 15
    assert repr(ORDINARY[0]) in str(raised.value)


def test_the_same_vocabulary_split_in_another_way_is_refused(served: Served) -> None:
    """SmolLM2's tokenizer as a GGUF file has it: without the rule that splits digits from letters."""
    loaded = copy.deepcopy(tokenizer("smollm2"))
    changed: Tokenizer = loaded.backend_tokenizer
    changed.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(LawViolationError) as raised:
        connected(served, loaded)
    assert raised.value.law == 15
    ids = {
        text: [each.encode(text, add_special_tokens=False) for each in (loaded, tokenizer("smollm2"))]
        for text in ORDINARY
    }
    first = next(text for text, (one, other) in ids.items() if one != other)
    assert repr(first) in str(raised.value)


def test_qwen3s_control_tokens_are_the_servers(tagged: Served) -> None:
    assert tagged.policy.vocabulary is VocabularyCheck.TOKENIZE
