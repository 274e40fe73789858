"""Server messages in errors have no API key and no control characters."""

from __future__ import annotations

import html
import re
import traceback
from collections.abc import Callable
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strands import Agent

from strands_tito.collect.run import failure_of
from support.backends import KINDS, WIRES, Kind, answering, backend_of, engine_of, http_response, http_to, request_of
from support.raw_server import RawServer
from support.scripted import tokenizer
from tito_conformance.testing import Fault, HashPolicy, always
from tito_core import Policy
from tito_core.backend import AuthenticationError, BackendError, BadRequestError, ProtocolViolationError, errors
from tito_core.backend.errors import LONGEST_ERROR, hide_causes
from tito_core.backend.generate import generate
from tito_core.backend.http.client import HttpRequest, decoded
from tito_core.backend.http.errors import error_from_status
from tito_core.store import to_record

KEY = "sekret-key-1"
END_ID = tokenizer().eos_token_id
ANSWERS = {
    "location": b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: http://x/?token=%s\r\n\r\n",
    "body": b"HTTP/1.1 400 Bad\r\nContent-Length: 12\r\n\r\n%s",
    "encoding": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Encoding: %s\r\n\r\n{}",
    "head": b"HTTP/1.1 2x0 %s OK\r\n\r\n",
    "reason": b"HTTP/1.1 %s\r\n\r\n",
}


@pytest.mark.parametrize("where", ANSWERS)
async def test_the_key_is_hidden_in_errors(where: str) -> None:
    with RawServer(ANSWERS[where] % KEY.encode()) as server:
        http = http_to("vllm", server.url, api_key=KEY, patience_s=0)
        with pytest.raises(BackendError) as caught:
            await http.send(HttpRequest("/x"))
        await http.aclose()
    assert KEY not in str(caught.value) + caught.value.body


SPELLINGS: list[Callable[[str], str]] = [
    str,
    lambda each: f"\\u{ord(each):04x}",  # .NET, and any JSON
    lambda each: f"\\u{ord(each):04X}",
    lambda each: f"\\\\u{ord(each):04x}",  # JSON in JSON
    lambda each: f"\\x{ord(each):02x}",
    lambda each: f"%{ord(each):02X}",
    lambda each: f"&#{ord(each)};",
    lambda each: f"&#x{ord(each):X};",
    lambda each: html.escape(each),
    lambda each: f"\\{each}" if each in "/'\"" else each,  # PHP
]


@given(
    key=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=8, max_size=30),
    around=st.sampled_from(["", "'", '"', "\\n", "\\u0027", "\\u0022", "x", "Bearer%20", "&quot;"]),
    status=st.sampled_from([200, 400, 401, 429, 500]),
    data=st.data(),
)
def test_no_spelling_of_the_key_is_shown(key: str, around: str, status: int, data: st.DataObject) -> None:
    errors._secrets.clear()  # the keys of other examples
    http_to("vllm", "http://h", api_key=key)
    spelled = "".join(data.draw(st.sampled_from(SPELLINGS))(each) for each in key)
    filler = "y" * data.draw(st.sampled_from([0, 70, 150, 195, 900, 1990]))
    body = f'{{"error": {{"message": "{filler} {around}{spelled}{around} no"}}}}'
    if status == 200:
        with pytest.raises(ProtocolViolationError) as caught:
            decoded(http_to("vllm", "http://h"), body.encode(), list[int])
        error: BackendError = caught.value
    else:
        error = error_from_status("vllm", status, body, {}, url="http://h", request_id=None)
    shown = "".join(traceback.format_exception(error)) + error.body + repr(error)
    for text in (shown, html.unescape(shown), unquote(shown), re.sub(r"\\+(u00|x)(..)", _character, shown)):
        assert key not in text
        assert key not in text.replace("\\", "")


def _character(match: re.Match[str]) -> str:
    try:
        return chr(int(match[2], 16))
    except ValueError:
        return match[0]


BAD = {
    "head": b"HTTP/1.1 200 OK\r\nx-a: " + b"y" * 100_000 + b"\r\n\r\n",
    "binary": bytes(range(128, 256)) * 40,
    "json": b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n"%s"' % KEY.encode(),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_answer_has_a_short_error_whose_causes_do_not_show_the_key(bad: str) -> None:
    with RawServer(BAD[bad]) as server:
        http = http_to("vllm", server.url, api_key=KEY, patience_s=0)
        with pytest.raises(BackendError) as caught:
            decoded(http, await http.send(HttpRequest("/x")), list[int])
        await http.aclose()
    assert len(str(caught.value)) <= LONGEST_ERROR
    assert str(caught.value).endswith(".")
    chain: list[BaseException | None] = [caught.value]
    for each in chain:
        if each is not None:
            assert KEY not in f"{each!r} {each}" + "".join(traceback.format_exception(each))
            chain += [each.__cause__, each.__context__]
    assert caught.value.__cause__ is not None, "the cause is still named"


def test_causes_at_any_depth_are_hidden_and_others_kept() -> None:
    http_to("vllm", "http://h", api_key=KEY)
    inner, plain, outer = ValueError(f"{KEY} is wrong"), KeyError("x"), BackendError("outer")
    plain.__context__, outer.__cause__ = inner, plain
    assert hide_causes(outer).__cause__ is plain
    assert str(plain.__context__) == "ValueError: <API key> is wrong"
    inner.__context__ = outer  # a circle ends
    hide_causes(outer)


def test_a_failed_rollout_does_not_show_the_key() -> None:
    http_to("vllm", "http://h", api_key=KEY)
    try:
        raise ValueError(f"{'x' * 5000} {KEY}")
    except ValueError as error:
        failure = failure_of(error)
    assert KEY not in failure.error + failure.traceback
    assert len(failure.error) < LONGEST_ERROR + 20


@pytest.mark.parametrize("word", ["vllm", "sglang", "http", "server"])
@pytest.mark.parametrize("where", ["location", "body", "encoding", "reason"])
async def test_a_short_key_is_hidden_in_what_a_server_says_and_not_in_its_address(where: str, word: str) -> None:
    """Many pass a word as the key of a server without one."""
    with RawServer(ANSWERS[where] % word.encode().ljust(12)) as server:
        http = http_to("vllm", f"{server.url}/{word}", api_key=word, patience_s=0)
        with pytest.raises(BackendError) as caught:
            await http.send(HttpRequest("/x"))
        await http.aclose()
    assert f"{server.url}/{word}" in str(caught.value)
    assert "<API key>" in str(caught.value)


@pytest.mark.parametrize("kind", WIRES)
async def test_a_key_that_a_server_reports_as_a_version_reaches_no_ledger(kind: Kind) -> None:
    policy = HashPolicy(len(tokenizer()), eos_ids=[END_ID])
    engine = engine_of(kind, policy, vocab_size=len(tokenizer()), eos_ids=[END_ID], release=KEY, model=f"org/{KEY}")
    engine.state.set_version(KEY)
    model = (await Policy.connect_async(backend=backend_of(engine, api_key=KEY), tokenizer=tokenizer())).model()
    await Agent(model=model, callback_handler=None).invoke_async("hello")
    assert len(model.ledger) == 1, "requests name the model by its own name"
    assert KEY not in (recorded := str(to_record(model.ledger)))
    assert "<API key>" in recorded


@pytest.mark.parametrize("kind", KINDS)
async def test_the_key_is_hidden_in_the_content_type_of_a_stream(kind: Kind) -> None:
    backend = backend_of(engine_of(kind, fault=always(Fault(content_type=f"text/{KEY}", body=b"x"))), api_key=KEY)
    backend._info = await backend_of(engine_of(kind)).connect()
    with pytest.raises(ProtocolViolationError) as caught:
        await generate(backend, request_of(), lambda _: None)
    assert KEY not in str(caught.value)
    assert "<API key>" in str(caught.value)


@given(status=st.integers(400, 599), words=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1))
def test_a_location_header_matters_only_for_a_redirect(status: int, words: str) -> None:
    plain = error_of(status, words, {})
    assert str(error_of(status, words, {"location": "/login"})) == str(plain)


@given(st.text())
def test_server_messages_cannot_control_a_terminal(words: str) -> None:
    message = str(error_of(400, words, {}))
    assert message.isprintable()


def error_of(status: int, body: str, headers: dict[str, str]) -> BackendError:
    return error_from_status("vllm", status, body, headers, url="http://h/x", request_id=None)


async def test_a_closed_endpoint_may_be_a_restart() -> None:
    open_to_all = backend_of(engine_of("vllm", scale_out=True))
    restarted = backend_of(engine_of("vllm", scale_out=False))
    restarted._info = await open_to_all.connect()
    with pytest.raises(AuthenticationError, match="restarted without it: connect again"):
        await generate(restarted, request_of())


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_lists_only_a_few_served_models(kind: Kind) -> None:
    served = {"data": [{"id": f"model-{n}-{'x' * 500}"} for n in range(200)]}
    backend = answering(kind, lambda request: http_response(200, json=served), model="other")
    with pytest.raises(BadRequestError, match=r"'other'.*and 195 more") as caught:
        await backend.connect()
    assert len(str(caught.value)) < 1000
