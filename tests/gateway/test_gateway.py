"""A gateway before scripted engines: its ledgers, sessions, spellings, retries and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, types
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from strands import Agent, tool
from strands.models.openai import OpenAIModel

from strands_tito.gateway import Gateway, HarnessAgent
from strands_tito.gateway.chat import REFUSED, SERVED, WITHOUT_EFFECT, chat_turn
from strands_tito.gateway.normalise import NORMALISERS, key_of_answer
from strands_tito.gateway.reply import Refusal
from strands_tito.integrations.run_rollout import run_rollout
from support.scripted import BACKENDS, Says, call, model_of
from tito_conformance.testing import Fault, first
from tito_core import store
from tito_core.store.file import LedgerFile

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number"},
                "b": {"type": "number"},
                "all": {"type": "boolean", "default": False},
            },
        },
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
FORCED = {"type": "function", "function": {"name": "none of these"}}
THINKS = "<think>\nSo.\n</think>\n\n"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}]


class Client:
    """A plain client in the gateway's process."""

    def __init__(self, gateway: Gateway, path: str = "/sessions/s", key: str = "EMPTY") -> None:
        self.gateway, self.path = gateway, path
        headers = {"Authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(transport=gateway.transport(httpx), base_url="http://gateway", headers=headers)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(self.path + path, json=body)

    async def chat(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        body = {"model": "any", "messages": messages, "tools": [ADD], **more}
        answer = await self.post("/v1/chat/completions", **body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0]["message"])

    async def trajectories(self) -> list[dict[str, Any]]:
        answer = await self.http.get(self.path + "/trajectories")
        return list(answer.json()["trajectories"])


@asynccontextmanager
async def gateway_of(*answers: Any, kind: str = "vllm", **options: Any) -> AsyncIterator[Gateway]:
    engine = {key: options.pop(key) for key in ("fault", "latency", "max_model_len", "store") if key in options}
    async with Gateway(model_of(kind, Says(*answers), **engine).policy, **options) as gateway:
        yield gateway


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_agents_through_the_gateway_have_the_ledgers_of_agents_on_the_model(kind: str, stream: bool) -> None:
    @tool
    def add(a: float, b: float) -> str:
        """Add numbers."""
        return str(a + b)

    answers = ("Two calls. " + call("add", '{"a":1, "b": 2.50}') + call("add", '{"a": 2, "b": 2}'), "It is so.", "Yes.")
    direct = model_of(kind, Says(*answers), malformed_calls="end_turn")
    agent = Agent(model=direct, tools=[add], system_prompt="Be brief.", callback_handler=None)
    await agent.invoke_async("Go.")
    await agent.invoke_async("Sure?")
    async with gateway_of(*answers, kind=kind) as gateway:
        served = OpenAIModel(
            client_args={"base_url": f"{gateway.url}/sessions/s/v1", "api_key": "EMPTY"},
            model_id="any",
            stream=stream,
        )
        agent = Agent(model=served, tools=[add], system_prompt="Be brief.", callback_handler=None)
        await agent.invoke_async("Go.")
        await agent.invoke_async("Sure?")
        ledger = gateway.ledger("s")
    assert ledger.annotations == ()
    assert _content(ledger) == _content(direct.ledger)


def _content(ledger: Any) -> list[Any]:
    """Return what the turns of a ledger say, without ids and times."""
    records = [store.records.turn_record(turn, engine=False) for turn in ledger]
    return [{key: value for key, value in each.items() if key not in ("fingerprint", "id")} for each in records]


def _echo(answer: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    kept = {key: answer[key] for key in ("role", "content", "tool_calls", "reasoning_content") if key in answer}
    return {**kept, **changes}


def _call(answer: Mapping[str, Any], **changes: Any) -> list[Any]:
    one = answer["tool_calls"][0]
    function = {**one["function"], **{key: changes[key] for key in ("name", "arguments") if key in changes}}
    return [{**one, "id": changes.get("id", one["id"]), "function": function}]


SPELLINGS: dict[str, tuple[Any, set[str]]] = {
    "same": (lambda a: _echo(a), set()),
    "key order": (lambda a: _echo(a, tool_calls=_call(a, arguments='{"b":2,"a":1.0}')), set()),
    "whole numbers": (lambda a: _echo(a, tool_calls=_call(a, arguments='{"a": 1, "b": 2}')), {"arguments"}),
    "blanks": (lambda a: _echo(a, content=f"\n {a['content']}  "), {"blanks"}),
    "defaults": (lambda a: _echo(a, tool_calls=_call(a, arguments='{"a": 1.0, "b": 2, "all": false}')), {"defaults"}),
    "new ids": (lambda a: _echo(a, tool_calls=_call(a, id="toolu_1")), {"ids"}),
    "no reasoning": (lambda a: _echo(a, reasoning_content=None), {"reasoning"}),
    "all": (
        lambda a: _echo(
            a, content=a["content"] + "\n", reasoning_content="", tool_calls=_call(a, id="x", arguments='{"a":1,"b":2}')
        ),
        {"arguments", "blanks", "ids", "reasoning"},
    ),
}
CHANGES: dict[str, Any] = {
    "text": lambda a: _echo(a, content="Another text."),
    "no text": lambda a: _echo(a, content=None),
    "arguments": lambda a: _echo(a, tool_calls=_call(a, arguments='{"a":1.5,"b":2}')),
    "boolean": lambda a: _echo(a, tool_calls=_call(a, arguments='{"a":true,"b":2}')),
    "name": lambda a: _echo(a, tool_calls=_call(a, name="sub")),
    "no call": lambda a: _echo(a, tool_calls=[]),
    "two calls": lambda a: _echo(a, tool_calls=_call(a) + _call(a, id="b")),
    "other reasoning": lambda a: _echo(a, reasoning_content="Hm."),
}
ANSWER = THINKS + "I add. " + call("add", '{"a": 1.0, "b": 2}')


async def _second_turn(gateway: Gateway, spell: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    client = Client(gateway)
    answer = await client.chat(HELLO)
    echoed = spell(answer)
    result = {"role": "tool", "tool_call_id": (echoed.get("tool_calls") or [{"id": "x"}])[0]["id"], "content": "3"}
    await client.chat([*HELLO, echoed, result if echoed.get("tool_calls") else {"role": "user", "content": "So?"}])
    return answer, await client.trajectories()


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_another_spelling_continues_the_turn_and_is_on_record(spelling: str) -> None:
    spell, names = SPELLINGS[spelling]
    async with gateway_of(ANSWER, "Three.") as gateway:
        _, rows = await _second_turn(gateway, spell)
        assert [row["turns"] for row in rows] == [[0, 1]]
        noted = gateway.ledger("s").annotation("gateway", turn=1)
        assert (set() if noted is None else set(noted["normalised"])) == names


@pytest.mark.parametrize("change", CHANGES)
async def test_another_content_is_a_branch(change: str) -> None:
    async with gateway_of(ANSWER, "Three.") as gateway:
        _, rows = await _second_turn(gateway, CHANGES[change])
        assert [row["turns"] for row in rows] == [[0], [1]]
        assert gateway.ledger("s")[1].draft.branch is not None


@pytest.mark.parametrize("properties", [[1], 5, None, {"a": 5}])
def test_a_schema_that_is_not_checked_yet_has_no_defaults(properties: Any) -> None:
    use: Any = {"toolUse": {"toolUseId": "x", "name": "add", "input": {"a": 1}}}
    tool: Any = {"name": "add", "description": "", "inputSchema": {"json": {"properties": properties}}}
    said: Any = [{"role": "assistant", "content": [use]}]
    assert key_of_answer(said, [tool]) == key_of_answer(said, None)


@pytest.mark.parametrize("off", NORMALISERS[:5])
async def test_each_normaliser_can_be_turned_off(off: str) -> None:
    spell = next(spell for spell, names in SPELLINGS.values() if names == {off})
    async with gateway_of(ANSWER, "Three.", normalisers=set(NORMALISERS) - {off}) as gateway:
        _, rows = await _second_turn(gateway, spell)
        assert len(rows) == 2


SIBLINGS: dict[str, tuple[str, str, Any]] = {
    "ids": (ANSWER, ANSWER.replace("So", "Yes"), lambda a: _echo(a, reasoning_content=None)),
    "numbers": (call("add", '{"a": 1}'), call("add", '{"a": 1.0}'), lambda a: _echo(a, tool_calls=_call(a, id="x"))),
    "reasoning": ("Three.", THINKS + "Three.", lambda a: _echo(a, content="Three. ")),
    "two calls": (call("add", "{}") * 2, call("add", "{}"), lambda a: _echo(a, tool_calls=_call(a, id="x") * 2)),
}


@pytest.mark.parametrize("case", SIBLINGS)
async def test_of_siblings_the_one_with_the_fewest_differences_goes_on(case: str) -> None:
    first_answer, second_answer, spell = SIBLINGS[case]
    async with gateway_of(first_answer, second_answer, "So.") as gateway:
        client = Client(gateway)
        echoed = spell(await client.chat(HELLO))
        await client.chat(HELLO)
        calls = echoed.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": each["id"], "content": "3"} for each in calls]
        await client.chat([*HELLO, echoed, *(results or [{"role": "user", "content": "And?"}])])
        # Two calls of one id are nobody's spelling: whose result is whose would be a guess.
        assert gateway.ledger("s")[2].parent == (None if case == "two calls" else 0)


async def test_a_sibling_sampled_later_leaves_other_paths_alone() -> None:
    thinks = [THINKS.replace("So", word) + "Go on." for word in ("One", "Two")]
    async with gateway_of(thinks[0], "Yes.", thinks[1], "No.") as gateway:
        client = Client(gateway)
        said = [*HELLO, _echo(await client.chat(HELLO), reasoning_content=None), {"role": "user", "content": "And?"}]
        answer = await client.chat(said)
        await client.chat(HELLO)
        await client.chat([*said, _echo(answer), {"role": "user", "content": "So?"}])
        assert [row["turns"] for row in await client.trajectories()] == [[2], [0, 1, 3]]


async def test_reminders_that_were_there_for_one_request_continue_the_path() -> None:
    """As strands-harness sends them, one or several."""
    noon, rome = (f"\n<system-reminder>\n{word}\n</system-reminder>" for word in ("Noon.", "Rome."))
    apart = [[0], [1], [2]]
    for texts, paths in (((noon,), [[0, 1, 2]]), ((noon, rome), [[0, 1, 2]]), (("Noon.", rome), apart)):
        async with gateway_of(call("add", "{}"), "Two.", "Yes.") as gateway:
            client = Client(gateway)
            said: list[Any] = [HELLO[0]]
            new: list[Any] = [HELLO[1]]
            for _ in range(3):
                said += new
                parts = [{"type": "text", "text": each["content"]} for each in new if each["role"] == "user"]
                kept = [each for each in new if each["role"] == "tool"]
                added = {"role": "user", "content": [*parts, *({"type": "text", "text": text} for text in texts)]}
                answer = await client.chat([*said[: -len(new)], *kept, added])
                said.append(_echo(answer))
                new = [{"role": "tool", "tool_call_id": t["id"], "content": "3"} for t in answer.get("tool_calls", ())]
                new = new or [{"role": "user", "content": "Sure?"}]
            assert [row["turns"] for row in await client.trajectories()] == paths


async def test_a_volatile_line_of_the_system_prompt_continues_the_path() -> None:
    async with gateway_of("One.", "Two.") as gateway:
        client = Client(gateway)

        def opening(nonce: str) -> list[Any]:
            return [{"role": "system", "content": f"x-anthropic-billing-header: cch={nonce};\nBe brief."}, HELLO[1]]

        answer = await client.chat(opening("a1"))
        await client.chat([*opening("b2"), _echo(answer), {"role": "user", "content": "And?"}])
        assert [row["turns"] for row in await client.trajectories()] == [[0, 1]]
        assert gateway.ledger("s").annotation("gateway", turn=1)["normalised"] == {"volatile": 1}


async def test_sessions_are_named_by_address_or_key_and_never_crossed() -> None:
    async with gateway_of("Hi.", api_key="door") as gateway:
        for path, key in (("/sessions/a", "door"), ("", "door:b"), ("/tasks/t/groups/g/samples/0", "door:x")):
            await Client(gateway, path, key).chat(HELLO)
        names = [ledger.header.user["session"] for ledger in gateway.ledgers]
        assert names == ["a", "b", "tasks/t/groups/g/samples/0"]
        labelled = gateway.ledgers[2].header
        assert (labelled.group_id, labelled.task_id, labelled.user["samples"]) == ("g", "t", "0")
        for path, key, status in (
            ("/sessions/a", "other:a", 401),
            ("/sessions/%ff", "door", 400),  # else it would be one with %fe
            ("/sessions//v1", "door", 404),
            ("/sessions/a/sessions/b", "door", 404),
        ):
            refused = await Client(gateway, path, key).post("/v1/chat/completions", messages=HELLO)
            assert refused.status_code == status, path
            assert refused.json()["error"]["message"]
        await Client(gateway, "/sessions/a%2Fb%2525", "door").chat(HELLO)
        assert len(gateway.ledger("a/b%25")) == 1
    for wrong in ({"host": "0.0.0.0"}, {"api_key": ""}, {"api_key": "a:b"}):
        with pytest.raises(ValueError, match="api_key"):
            Gateway(gateway.policy, **wrong)


async def test_without_a_name_content_decides_and_equal_prompts_are_rollouts_of_their_own() -> None:
    async with gateway_of("Same.", latency=0.01) as gateway:
        client = Client(gateway, "")
        answers = await asyncio.gather(*(client.chat(HELLO) for _ in range(3)))
        assert [len(ledger) for ledger in gateway.ledgers] == [1, 1, 1]
        # Equal answers: each continuation takes one that was not continued, though all come at once.
        said = [[*HELLO, _echo(answer), {"role": "user", "content": "And?"}] for answer in answers]
        await asyncio.gather(*(client.chat(each) for each in said))
        assert [len(ledger) for ledger in gateway.ledgers] == [2, 2, 2]
        note = {"role": "assistant", "content": "A note of the harness."}
        await client.chat([*HELLO, note, {"role": "user", "content": "And?"}])
        assert [len(ledger.trajectories) for ledger in gateway.ledgers] == [1, 1, 1, 1]
        assert (
            await client.post("/v1/chat/completions", messages=[{"role": "user", "content": [{}]}])
        ).status_code == 400
        assert (await client.post("/v1/chat/completions", messages=[])).status_code == 400
        assert len(gateway.ledgers) == 4  # what is refused begins none
        for ledger in gateway.ledgers[1:]:
            await gateway.end(ledger.uuid)
        await client.http.delete(f"/sessions/{gateway.ledgers[-1].uuid}")
        assert not gateway._answers


async def test_an_equal_request_while_the_first_runs_is_one_turn_and_afterwards_a_sibling() -> None:
    async with gateway_of("One.", "Two.", latency=0.05) as gateway:
        client = Client(gateway)
        first_answer, second = await asyncio.gather(client.chat(HELLO), client.chat(HELLO))
        assert first_answer == second
        assert len(gateway.ledger("s")) == 1
        assert (await client.chat(HELLO))["content"] == "Two."
        assert [row["turns"] for row in await client.trajectories()] == [[0], [1]]


async def test_a_retry_gets_its_own_sample_after_one_that_was_refused() -> None:
    async with gateway_of("One.", "Two.", "Three.", latency=0.01, max_turns=1) as gateway:
        client = Client(gateway)
        await client.chat(HELLO)
        body: dict[str, Any] = {"model": "any", "messages": HELLO, "tools": [ADD]}
        path = "/sessions/s/v1/chat/completions"
        asked = [client.http.post(path, json=each) for each in ({"messages": HELLO[1:]}, body)]
        assert [each.status_code for each in await asyncio.gather(*asked)] == [200, 429]
        retried = await client.http.post(path, json=body, headers={"x-stainless-retry-count": "1"})
        assert retried.json()["choices"][0]["message"]["content"] == "Three."


async def test_an_answer_that_was_not_written_whole_is_kept_for_the_retry() -> None:
    async with gateway_of("One.", "Two.") as gateway:
        client = Client(gateway)
        body = {"model": "any", "messages": HELLO, "tools": [ADD]}
        request = client.http.build_request("POST", "/sessions/s/v1/chat/completions", json=body)
        lost = await client.http.send(request, stream=True)
        await lost.aclose()  # committed, and not read
        assert len(gateway.ledger("s")) == 1
        assert (await client.chat(HELLO))["content"] == "One."
        assert (await client.chat(HELLO))["content"] == "Two."


async def test_a_client_that_goes_away_aborts_the_request_and_leaves_nothing() -> None:
    model = model_of("sglang", Says("One.", "Two."), latency=3600.0)
    async with Gateway(model.policy) as gateway:
        for stream in (False, True):
            host, port = gateway.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps({"model": "any", "messages": HELLO, "stream": stream}).encode()
            head = f"POST /sessions/s/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            engine = model.scripted  # type: ignore[attr-defined]
            while not engine.running:
                await asyncio.sleep(0.01)
            for busy in (Client(gateway).post("/end"), Client(gateway).http.delete("/sessions/s")):
                assert (await busy).json()["error"]["code"] == "session_busy"
            writer.close()
            while engine.running:
                await asyncio.sleep(0.01)
            assert await reader.read() == b""
        assert len(gateway.ledger("s")) == 0


async def test_a_gateway_that_stops_aborts_the_requests_of_clients_in_its_process() -> None:
    model = model_of("vllm", Says("One."), latency=3600.0)
    async with Gateway(model.policy) as gateway:
        asked = asyncio.create_task(Client(gateway).post("/v1/chat/completions", messages=HELLO))
        while not model.scripted.running:  # type: ignore[attr-defined]
            await asyncio.sleep(0.01)
    assert not model.scripted.running  # type: ignore[attr-defined]
    assert (await asked).json()["error"]["code"] == "stopping"


async def test_sessions_end_with_a_reward_and_refuse_later_calls() -> None:
    async with gateway_of("One.", "Two.") as gateway:
        client = Client(gateway)
        await client.chat(HELLO)
        await client.chat(HELLO)
        for wrong in ({"reward": 1.0, "leaf": 5}, {"reward": 1e300}, {"termination": "x"}, {"leaf": True}, {"x": 1}):
            assert (await client.post("/end", **wrong)).status_code == 400
        with pytest.raises(TypeError):
            await gateway.end("s", reward=1.0, annotations={"judge": object()})
        assert gateway.ledger("s").annotations == ()
        assert (await client.post("/end", reward=0.5, annotations={"judge": "ok"})).status_code == 200
        noted = [(each.name, each.value, each.turn) for each in gateway.ledger("s").annotations]
        assert noted == [("reward", 0.5, 1), ("judge", "ok", None), ("termination", "completed", None)]
        refused = await client.post("/v1/chat/completions", messages=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (410, "session_ended")
        assert (await Client(gateway, "/sessions/none").post("/end")).status_code == 404


async def test_idle_sessions_end_and_too_many_are_refused() -> None:
    async with gateway_of("One.", idle_s=0.001, max_sessions=1) as gateway:
        await Client(gateway).chat(HELLO)
        await asyncio.sleep(0.01)
        refused = await Client(gateway, "/sessions/b").post("/v1/chat/completions", messages=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_sessions")
        assert gateway.ledger("s").annotation("termination") == "limit"
        assert (await Client(gateway).http.delete("/sessions/s")).status_code == 200
        await Client(gateway, "/sessions/b").chat(HELLO)


async def test_a_session_is_pinned_to_a_weight_version() -> None:
    async with gateway_of("One.", kind="sglang") as gateway:
        client = Client(gateway)
        assert (await client.post("", weight_version="7")).status_code == 200
        assert (await client.post("", weight_version="8")).status_code == 409
        refused = await client.post("/v1/chat/completions", messages=HELLO)
        assert (refused.status_code, len(gateway.ledger("s"))) == (410, 1)
        assert gateway.ledger("s").annotation("termination") == "aborted"


async def test_a_restart_keeps_each_turn_and_goes_on(tmp_path: Any) -> None:
    path = tmp_path / "rollouts.tito"
    with LedgerFile(path, "a") as file:
        async with gateway_of("One.", store=file) as gateway:
            answer = await Client(gateway).chat(HELLO)
            await Client(gateway, "/sessions/t").chat(HELLO)
            await gateway.end("t")
    with LedgerFile(path, "a") as file:
        async with gateway_of("Two.", store=file) as gateway:
            await Client(gateway).chat([*HELLO, _echo(answer), {"role": "user", "content": "And?"}])
            ended = await Client(gateway, "/sessions/t").post("/v1/chat/completions", messages=HELLO)
            assert ended.status_code == 410
    assert [[row.turns for row in ledger.trajectories] for ledger in store.read(path)] == [[(0, 1)], [(0,)]]


@pytest.mark.parametrize(
    ("engine", "status", "code"),
    [
        ({"max_model_len": 40}, 400, "context_length_exceeded"),
        ({"fault": first(99, Fault(status=400))}, 400, None),
        ({"fault": first(99, Fault(status=500))}, 502, "engine_error"),
    ],
)
async def test_errors_have_the_wires_own_shape(engine: Any, status: int, code: str | None) -> None:
    async with gateway_of("One.", **engine) as gateway:
        for stream in (False, True):
            answer = await Client(gateway).post("/v1/chat/completions", messages=HELLO, tools=[ADD], stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        assert len(gateway.ledger("s")) == 0


async def test_fixed_sampling_and_ignored_keys_are_on_record() -> None:
    async with gateway_of("One.", fixed_sampling=True, ignored={"n"}, sampling={"temperature": 0.7}) as gateway:
        client = Client(gateway)
        said = [HELLO[0], {**HELLO[1], "name": "Ann"}]
        for _ in range(2):
            await client.chat(
                said, temperature=0.1, n=4, user="me", tools=[{**ADD, "function": {**ADD["function"], "strict": True}}]
            )
        ledger = gateway.ledger("s")
        assert ledger[0].draft.sampling["temperature"] == 0.7
        assert ledger.annotation("gateway", turn=0)["ignored"] == [
            *("messages.name", "n", "temperature", "tools.function.strict", "user")
        ]
        assert ledger.annotation("gateway", turn=1) is None


def test_every_key_of_openais_request_is_served_without_effect_or_refused() -> None:
    places = [SERVED, WITHOUT_EFFECT, frozenset(REFUSED)]
    for key in [*CompletionCreateParamsBase.__annotations__, "stream"]:
        assert sum(key in place for place in places) == 1, key
    for key in [*REFUSED, "best_of", "temprature"]:
        with pytest.raises(Refusal, match=key):
            chat_turn({"messages": HELLO, key: 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": "Hi."},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "Hi."}]},
        {"messages": [HELLO[1], HELLO[0]]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        {"messages": [{"role": "system", "content": [IMAGE]}]},  # no template shows it there: it would be lost
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Hi."}, IMAGE]}]},
        {"messages": [*HELLO, {"role": "assistant", "content": "Hi.", "refusal": "No."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        {"messages": [{"role": "tool", "content": "3"}]},
        {"messages": HELLO, "stream": "false"},
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"messages": HELLO, "n": 2},
        {"messages": HELLO, "tools": [{"type": "custom"}]},
        {"messages": HELLO, "tool_choice": "sometimes"},
        {"messages": HELLO, "response_format": {"type": "grammar"}},
        {"messages": HELLO, "parallel_tool_calls": False},
    ],
)
def test_what_cannot_be_served_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(Refusal):
        chat_turn(wrong)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"messages": []}',
        json.dumps({"messages": HELLO, "temperature": -1}).encode(),
        json.dumps({"messages": HELLO, "seed": 10**30}).encode(),
        json.dumps({"messages": HELLO, "stream_options": 5}).encode(),
        json.dumps({"messages": HELLO, "logit_bias": {"word": 1}}).encode(),
        json.dumps({"messages": HELLO, "logit_bias": {"5": [1]}}).encode(),
        b'{"messages": [{"role": "user", "content": "Hi."}], "tools": [{"type": "function", "function": {"name": "f", '
        + b'"parameters": {"a": '
        + b"[" * 900
        + b"]" * 900
        + b"}}}]}",
        json.dumps({"messages": HELLO, "tools": [ADD], "tool_choice": FORCED}).encode(),
    ],
    ids=range(10),
)
async def test_bodies_that_are_no_request_are_errors(body: bytes) -> None:
    async with gateway_of("One.") as gateway:
        await Client(gateway).chat(HELLO)
        answer = await Client(gateway).http.post("/sessions/s/v1/chat/completions", content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]


async def test_openai_types_read_the_answers() -> None:
    async with gateway_of("Hi. " + call("add", '{"a": 1}')) as gateway:
        client = Client(gateway)
        body = {"model": "any", "messages": HELLO, "tools": [ADD], "logprobs": True}
        whole = await client.http.post("/sessions/s/v1/chat/completions", json=body)
        read = types.chat.ChatCompletion.model_validate(whole.json(), strict=True)
        sampled = gateway.ledger("s")[0].draft.columns.output
        assert read.choices[0].finish_reason == "tool_calls"
        assert read.usage.completion_tokens == sampled
        assert len(read.choices[0].logprobs.content) == sampled


@pytest.mark.parametrize("kind", BACKENDS)
async def test_a_harness_in_the_place_of_an_agent_fills_the_models_ledger(kind: str) -> None:
    async def harness(url: str, prompt: Any) -> None:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="EMPTY") as client:
            said: list[Any] = [{"role": "user", "content": prompt[0]["content"][0]["text"]}]
            for _ in range(2):
                answer = await client.chat.completions.create(model="any", messages=said, max_tokens=7)
                said += [{"role": "assistant", "content": answer.choices[0].message.content}]
                said += [{"role": "user", "content": "And?"}]

    model = model_of(kind, Says("One.", "Two."), sampling={"temperature": 0.5})
    agent: Any = HarnessAgent(model, harness)
    result = await run_rollout(agent, model, [{"role": "user", "content": "Go."}])
    assert (result.ledger is model.ledger, result.termination, result.error) == (True, "completed", None)
    assert [path.turns for path in model.trajectories] == [(0, 1)]
    assert model.ledger[0].draft.sampling["temperature"] == 0.5
