"""The model's certificate, the parser's control strings, and the options that change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.byte_level import SPECIAL, byte_level
from support.drafts import make_draft
from support.scripted import Says, backend_of, engine_of, policy_of, tokenizer
from tito_core import Ledger, Policy, TITOModel, store
from tito_core.parsing import control_strings, get_tool_parser
from tito_core.turn.inputs import TurnInput
from tito_core.turn.recording import Recording

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TAGS = ("<minimax:tool_call>", "</minimax:tool_call>", "[stop]")


def connected(**options: Any) -> Policy:
    """Connect with a template without the parser's tags, which the tokenizer has as tokens."""
    loaded = byte_level(TAGS, PLAIN + PROMPT, SPECIAL, {"eos_token": "[stop]", "pad_token": "<|endoftext|>"})
    served = {"vocab_size": len(loaded), "eos_ids": [loaded.eos_token_id]}
    engine = engine_of("vllm", Says(""), encode=lambda text, _: loaded.encode(text), **served)
    return Policy.connect(backend=backend_of(engine, "vllm"), tokenizer=loaded, **{"parser": "hermes", **options})


def spelled(policy: Policy) -> list[str]:
    message: Any = {"role": "user", "content": [{"text": " ".join(TAGS)}]}
    ids = policy.template.first_prompt([message], None, None).ids.tolist()
    return [tag for tag in TAGS if policy.tokenizer.convert_tokens_to_ids(tag) in ids]


def test_every_ledgers_header_has_the_certificate(tmp_path: Path) -> None:
    policy = policy_of("vllm")
    ledger = policy.ledger(group_id="g", task_id="t", user={"a": 1})
    assert (ledger.header.group_id, ledger.header.task_id, dict(ledger.header.user or {})) == ("g", "t", {"a": 1})
    assert ledger.header.tokenizer == policy.tokenizer.name_or_path
    certificate = policy.template.certificate
    assert policy.model().certificate is certificate
    recorded = ledger.header.certificate
    assert recorded is not None
    assert (recorded["template"], recorded["tokenizer"]) == (certificate.template, certificate.tokenizer)
    assert recorded["candidate"] == certificate.candidate
    assert recorded["passed"] == len(certificate.passed)
    assert recorded["thinking"] == str(certificate.thinking)
    assert recorded["content_tokens"] == "inert"
    ledger.commit(make_draft(None, 0, [100], [200]))
    store.append(tmp_path / "rollouts.tito", [ledger])
    assert store.read(tmp_path / "rollouts.tito")[0].header == ledger.header
    assert store.from_record(store.to_record(ledger)).header == ledger.header
    assert policy.model().ledger.header.certificate == recorded


def test_content_contains_no_parser_markup_and_no_stop() -> None:
    assert spelled(connected(parser="minimax_m2")) == []
    assert spelled(connected(parser="hermes")) == list(TAGS[:2])  # ordinary tokens to this parser


def test_content_tokens_are_the_users_choice_and_on_the_certificate() -> None:
    policy = connected(parser="minimax_m2", content_tokens="as-template")
    assert spelled(policy) == list(TAGS)
    assert policy.template.certificate.content_tokens == "as-template"
    assert policy.template.fingerprint != connected(parser="minimax_m2").template.fingerprint


def test_a_ledger_of_inert_content_takes_no_turns_of_other_content() -> None:
    inert, raw = connected(), connected(content_tokens="as-template")
    with pytest.raises(ValueError, match="an inert policy, or start a new ledger"):
        raw.model(ledger=inert.model().ledger)
    kept = raw.model().ledger
    assert inert.model(ledger=kept).ledger is kept


async def test_a_ledger_takes_no_turns_of_another_tokenizer(tmp_path: Path) -> None:
    """Its header names the tokenizer that decodes it."""
    first, second = connected(), policy_of("vllm")
    for one, other in ((first, second), (second, first)):
        ledger = one.model().ledger
        with pytest.raises(ValueError, match=r"Law 15.*start a new ledger"):
            other.model(ledger=ledger)
        assert one.model(ledger=ledger).ledger is ledger
    unknown = Ledger()
    assert second.model(ledger=unknown).ledger is unknown
    ledger = second.model().ledger
    ledger.commit(make_draft(None, 0, [100, 101], [200, 201]))
    store.append(tmp_path / "rollouts", [ledger])
    restored = TurnInput([], model_state={"tito": {"ledger": ledger.uuid, "turn": 0}})
    with (
        store.LedgerFile(tmp_path / "rollouts", "a") as file,
        pytest.raises(ValueError, match=r"Law 15.*start a new ledger"),
    ):
        await Recording(connected(store=file), None).begin(restored)


async def test_a_restored_ledger_of_inert_content_takes_no_turns_of_other_content(tmp_path: Path) -> None:
    with store.LedgerFile(tmp_path / "rollouts", "a") as file:
        inert, raw = (connected(content_tokens=each, store=file) for each in ("inert", "as-template"))
        ledger = inert.model().ledger
        ledger.commit(make_draft(None, 0, [100, 101], [200, 201]))
        restored = TurnInput([], model_state={"tito": {"ledger": ledger.uuid, "turn": 0}})
        recording = Recording(raw, None)
        for _ in range(2):  # a second try does not continue in another ledger
            with pytest.raises(ValueError, match="an inert policy, or start a new ledger"):
                await recording.begin(restored)
        assert (await Recording(inert, None).begin(restored)).uuid == ledger.uuid


def test_a_parsers_own_control_strings_are_tags_and_anchors_that_are_tokens() -> None:
    loaded = byte_level(("<minimax:tool_call>", "<think>"))
    assert control_strings(get_tool_parser("minimax_m2", loaded)) == {"<minimax:tool_call>", "<think>"}
    assert control_strings(get_tool_parser("gpt_oss", byte_level(("<|call|>",)))) == {"<|call|>"}
    dsml = byte_level(("｜DSML｜",))
    assert control_strings(get_tool_parser("deepseek_v32", dsml)) == {"｜DSML｜"}


def test_a_third_party_parser_may_name_its_control_strings() -> None:
    class Foreign:
        control_strings = ("<a>", "<b>")

    assert control_strings(Foreign()) == {"<a>", "<b>"}  # type: ignore[arg-type]
    assert control_strings(object()) == frozenset()  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["content_tokens", "markup", "certificates", "certificates, markup"])
def test_template_arguments_cannot_be_taken_for_others(names: str) -> None:
    given = dict.fromkeys(("x", *reversed(names.split(", "))), "as-template")
    with pytest.raises(ValueError, match=f"template_arguments has {names}, .*content_tokens="):
        connected(template_arguments=given)


def test_content_tokens_are_one_of_two() -> None:
    engine = engine_of("vllm", Says(""))
    with pytest.raises(ValueError, match=r"content_tokens .*'inert' or 'as-template'.*'raw'"):
        TITOModel(backend=backend_of(engine, "vllm"), tokenizer=tokenizer(), content_tokens="raw")  # type: ignore[arg-type]


def test_arguments_are_part_of_what_a_rollout_is() -> None:
    other = connected(template_arguments={"enable_thinking": False})
    assert other.template.fingerprint != connected().template.fingerprint
    assert "('enable_thinking', False)" in other.template.certificate.arguments
