"""The data of a page: columns, bytes of tokens, entropy and drift."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from strands_tito.inspect.score import PREFIX, as_json, encoded
from strands_tito.viewer.data import Evidence, TokenText, TokenTexts, entropy, ledger_data, trajectory_data
from strands_tito.viewer.site import as_inert_json
from support.rollout_forests import HOT, RAW, chain, rollouts
from support.scripted import ids_of, tokenizer
from support.shown import real, rich, sentencepiece_like
from tito_core.ledger import Ledger, VocabularyCheck

NOTHING = Evidence()


def column(text: str, dtype: str) -> list[Any]:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


@settings(max_examples=20)
@given(ledger=rollouts())
def test_a_page_holds_every_column_of_the_ledger(ledger: Ledger) -> None:
    data = json.loads(as_inert_json(ledger_data(ledger, NOTHING)))
    assert len(data["turns"]) == len(ledger)
    for turn, shown in zip(ledger, data["turns"], strict=True):
        draft = turn.draft
        assert column(shown["ids"], "<i4") == draft.columns.ids.tolist()
        assert column(shown["logprobs"], "<f4") == draft.logprobs.tolist()
        assert column(shown["provenance"], "u1") == draft.prompt_provenance.tolist()
        assert (shown["parent"], shown["finish"]) == (draft.parent, draft.finish)
        assert [call["reason"] for call in shown["calls"]] == [call.reason for call in draft.calls]
        assert [tuple(span) for span in shown["versions"]] == [tuple(span) for span in draft.engine.versions]


@settings(max_examples=20)
@given(ledger=rollouts())
def test_a_trajectory_holds_its_path_and_the_context_turns(ledger: Ledger) -> None:
    for trajectory in ledger.trajectories():
        data = trajectory_data(trajectory, NOTHING)
        assert [turn["index"] for turn in data["turns"]] == list(trajectory.turns)
        assert data["context"] == sorted(trajectory.context_turns)


MEANING = {"model": "big", "weight_version": "7", "vocabulary": VocabularyCheck.TOKENIZE, "semantics": RAW}
FACTS = as_json(MEANING)


def score(ledger: Ledger, scores: dict[int, np.ndarray], column: str = "trainer", **facts: Any) -> None:
    for turn, values in scores.items():
        ledger.annotate(PREFIX + column, encoded(values.astype(np.float32), {**FACTS, **facts}), turn=turn)


@settings(max_examples=40)
@given(ledger=rollouts(), draw=st.data())
def test_a_page_has_the_mismatch_of_each_column_by_turn_and_by_position(ledger: Ledger, draw: st.DataObject) -> None:
    scored = draw.draw(st.sets(st.sampled_from(range(len(ledger))), min_size=1))
    random = np.random.default_rng(draw.draw(st.integers(0, 9)))
    scores = {index: -random.exponential(2, ledger[index].own_length) for index in sorted(scored)}
    score(ledger, scores)
    (found,) = json.loads(as_inert_json(ledger_data(ledger, NOTHING)))["mismatches"]
    ratios: dict[tuple[str, str], list[float]] = {}
    for index in scored:
        draft, start = ledger[index].draft, ledger[index].draft.columns.prompt
        if draft.engine.semantics.temperature != 1.0 or draft.engine.semantics.adjusted:
            continue
        for at, (ours, theirs) in enumerate(
            zip(draft.logprobs.tolist(), scores[index][start:].astype(np.float32).tolist(), strict=True)
        ):
            first = at if at < 2 else 2 ** int(math.log2(at))
            for key in (("all", ""), ("turn", str(index)), ("position", str(first))):
                ratios.setdefault(key, []).append(math.exp(theirs - ours))
    assert {(kind, key) for kind, key, *_ in found["rows"]} == set(ratios)
    for kind, key, *shown in found["rows"]:
        every = ratios[kind, key]
        kl = sum(r - 1 - math.log(r) for r in every) / len(every)
        reverse = sum(r * math.log(r) - r + 1 for r in every) / len(every)
        size = sum(every) ** 2 / sum(r * r for r in every) / len(every)
        far = sum(not 0.5 <= r <= 2 for r in every) / len(every)
        assert shown == pytest.approx([len(every), kl, reverse, size, far], rel=1e-6, abs=1e-9)
    total = sum(turn.draft.columns.output for turn in ledger)
    assert found["leftOut"] == total - len(ratios.get(("all", ""), []))
    assert (found["name"], found["model"]) == ("the column trainer", "big")


def test_columns_that_cannot_be_compared_are_named_and_no_others_are_lost() -> None:
    ledger = chain((2, 3), (1, 4))
    score(ledger, {0: np.full(5, -1.0), 1: np.full(5, -1.0)}, "good")
    score(ledger, {0: np.full(5, -1.0)}, "mixed")
    score(ledger, {1: np.full(5, -1.0)}, "mixed", model="other")
    score(ledger, {0: np.full(4, -1.0)}, "short")
    score(
        ledger,
        {0: np.full(5, -1.0)},
        "warm",
        semantics=as_json({"vocabulary": VocabularyCheck.TOKENIZE, "semantics": HOT})["semantics"],
    )
    good, mixed, short, warm = ledger_data(ledger, NOTHING)["mismatches"]
    assert (good["leftOut"], good["rows"][0][:3]) == (0, ("all", "", 7))
    assert "Law 11: column 'mixed' of turn 1" in mixed["problem"]
    assert "the scores 'short' of turn 0" in short["problem"]
    assert (warm["leftOut"], warm["rows"]) == (7, [])


def test_media_alternatives_branches_and_annotations_are_in_the_data() -> None:
    data = ledger_data(rich(), NOTHING)
    first, second, third = data["turns"]
    assert first["media"] == [(1, 2, bytes(range(32)).hex())]
    assert first["promptLogprobs"]["start"] == 1
    assert second["top"]["start"] == 2, "offsets count from the first token that the turn adds"
    assert second["top"]["k"] == 2
    assert third["branch"] == {"why": "retry, from turn 1, at message 2", "turn": 1}
    assert (third["constrained"], third["open"]) == (True, True)
    assert {(note["name"], note["value"], note["turn"]) for note in data["notes"]} == {
        ("reward", "1.0", None), ("termination", "completed", None), ("judge", '{"why":"right"}', 1),
    }  # fmt: skip
    assert ("task", "task") in data["facts"]
    assert data["broken"] == ""


def test_a_broken_law_is_shown_and_not_raised() -> None:
    whole = rich()
    drafts = [turn.draft for turn in whole]
    object.__setattr__(drafts[1], "prompt_length", 3)
    assert "Law" in ledger_data(Ledger.load(whole.header, drafts, ()), NOTHING)["broken"]


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.001, 1), min_size=1, max_size=12).map(lambda parts: np.array(parts) / sum(parts)),
    st.integers(1, 12),
)
def test_entropy_of_the_top_tokens_is_a_lower_bound_and_exact_for_all_tokens(probabilities: np.ndarray, k: int) -> None:
    whole = float(-(probabilities * np.log(probabilities)).sum())
    top = np.sort(probabilities)[::-1][:k]
    row = np.full((1, 12), np.nan)
    row[0, : len(top)] = np.log(top)
    found = float(entropy(row)[0])
    assert -1e-9 <= found <= whole + 1e-9
    if k >= len(probabilities):
        assert found == pytest.approx(whole, abs=1e-9)


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(ids_of("The digits of 2-digited 🦜é numbers: don't\n\n  stop")), min_size=1, max_size=12)
)
def test_drift_holds_the_re_tokenized_ids(ids: list[int]) -> None:
    text = TokenText(tokenizer())
    again = list(tokenizer().encode(tokenizer().decode(ids, skip_special_tokens=False), add_special_tokens=False))
    runs = text.drift(ids)
    spliced, at = [], 0
    for run in runs:
        assert at <= run.start < run.stop or run.start == run.stop
        spliced += ids[at : run.start] + run.ids
        at = run.stop
    assert spliced + ids[at:] == again
    assert bool(runs) == (again != ids)


def test_only_the_tokens_that_drift_are_marked() -> None:
    plain, joined = ids_of("The answer is"), ids_of(" digit") + ids_of("ed")
    end = ids_of(" right.")
    text = TokenText(tokenizer())
    assert ids_of(" digited") != joined, "or the example shows nothing"
    (run,) = text.drift([*plain, *joined, *end])
    assert (run.start, run.stop) == (len(plain), len(plain) + len(joined))
    assert run.ids == ids_of(" digited")


@settings(max_examples=30)
@given(st.text(max_size=40))
def test_the_bytes_of_tokens_join_to_the_text(text: str) -> None:
    ids = ids_of(text)
    shown = TokenText(tokenizer())
    assume(tokenizer().decode(ids) == text)  # the vocabulary has no token for some characters
    assert b"".join(map(shown.piece, ids)) == text.encode()


def test_bytes_of_other_vocabularies_and_of_unknown_ids() -> None:
    plain: PreTrainedTokenizerFast = sentencepiece_like()
    shown = TokenText(plain)
    assert b"".join(map(shown.piece, [0, 1, 2, 3, 4])) == " Hi€!".encode()
    assert shown.piece(999) == b""
    assert shown.piece(2**31 - 1) == b""
    assert TokenText(tokenizer()).piece(2**31 - 1) == b""


def test_bytes_that_are_not_utf_8_are_hexadecimal() -> None:
    ledger = real("vllm").load(1)
    emoji = ids_of("🦜")
    assert len(emoji) > 1, "or no token holds a part of a character"
    pieces = ledger_data(ledger, Evidence(TokenText(tokenizer())))["pieces"]
    every = {int(token) for turn in ledger for token in turn.draft.columns.ids}
    assert {int(token) for token in pieces} >= every
    assert TokenText(tokenizer()).piece(emoji[0])[:1] == b"\xf0" or b" " in TokenText(tokenizer()).piece(emoji[0])


def test_a_rollouts_own_tokenizer_is_loaded_from_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def never(name: str) -> None:
        raise AssertionError(f"the hub was queried for {name}")

    monkeypatch.setattr("tito_core.chat.tokenizer._check_hub", never)
    texts = TokenTexts()
    assert texts.named("missing/model") is None
    assert texts.named(None) is None
    tokenizer().save_pretrained(tmp_path / "here")
    loaded = texts.named(str(tmp_path / "here"))
    assert loaded is not None
    assert loaded is texts.named(str(tmp_path / "here")), "it is loaded once"
