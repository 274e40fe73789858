"""The stranger's defects in streamed events. vLLM's events hold new tokens only, SGLang's the answer so far."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from conformance.defects.stranger_hooks import VLLM, on_events

Events = list[Any]


def _tokens(event: Any) -> list[int]:
    return list(event["choices"][0]["token_ids"] or ()) if event["choices"] else []


@on_events(4, "a chunk lost at the boundary of a proxy's buffer", wires=VLLM)
def event_lost(events: Events) -> None:
    """One event in the middle is lost."""
    del events[len(events) // 2]


@on_events(4, "chunks sent again after a reconnect", wires=VLLM)
def event_repeated(events: Events) -> None:
    """One event in the middle arrives twice, and the usage counts it."""
    at = len(events) // 2
    events.insert(at, deepcopy(events[at]))
    if (usage := events[-1].get("usage")) is not None:
        usage["completion_tokens"] += 1
        usage["total_tokens"] += 1


@on_events(4, "two tasks write one stream", wires=VLLM)
def events_swapped(events: Events) -> None:
    """Two neighbouring events of a stream of over 12 are swapped."""
    if len(events) > 12:
        events[5], events[6] = events[6], events[5]


@on_events(4, "merged chunks with one entry of logprobs: SGLang #39260, Rapid-MLX #209", wires=VLLM)
def merged_events_share_a_logprob(events: Events) -> None:
    """When two tokens share an event, both have the logprob of the first."""
    first, second = events[2]["choices"][0], events[3]["choices"][0]
    if not events[3]["choices"] or second["finish_reason"] or not first["logprobs"]:
        return
    first["token_ids"] += second["token_ids"]
    if "content" in first["logprobs"]:
        row = deepcopy(first["logprobs"]["content"][0])
        other = second["logprobs"]["content"][0]
        row["token_id"], row["token"] = other["token_id"], other.get("token")
        for top in row.get("top_logprobs") or ():
            if top["token_id"] == first["logprobs"]["content"][0]["token_id"]:
                top["token_id"] = other["token_id"]
        first["logprobs"]["content"].append(row)
    else:
        value = first["logprobs"]["token_logprobs"][0]
        for name in ("tokens", "text_offset", "top_logprobs"):
            first["logprobs"][name] += second["logprobs"][name]
        first["logprobs"]["token_logprobs"].append(value)
        token = first["logprobs"]["tokens"][1]
        if first["logprobs"]["top_logprobs"][1]:
            first["logprobs"]["top_logprobs"][1] = {token: value}
    first["text"] = (first.get("text") or "") + (second.get("text") or "") if "text" in first else None
    if first.get("text") is None:
        first.pop("text", None)
    del events[3]


@on_events(4, "the finish event swallows its token", wires=VLLM)
def last_token_lost(events: Events) -> None:
    """The event of the finish has no token any more; the usage counts one less."""
    last = next(event for event in reversed(events) if event["choices"])
    choice = last["choices"][0]
    choice["token_ids"] = []
    if choice["logprobs"] and "content" in choice["logprobs"]:
        choice["logprobs"]["content"] = []
    elif choice["logprobs"]:
        choice["logprobs"] = {name: [] for name in choice["logprobs"]}
    if (usage := events[-1].get("usage")) is not None:
        usage["completion_tokens"] -= 1
        usage["total_tokens"] -= 1


@on_events(4, "a finish reason set before the buffer is drained", wires=VLLM)
def finish_in_the_middle(events: Events) -> None:
    """The finish reason comes three events early, and tokens follow it."""
    shown = [event["choices"][0] for event in events if event["choices"]]
    shown[-4]["finish_reason"], shown[-4]["stop_reason"] = shown[-1]["finish_reason"], shown[-1]["stop_reason"]


@on_events(4, "incomplete UTF-8 held back together with its ids", wires=("vllm-completions",))
def held_bytes_lose_their_id(events: Events) -> None:
    """A token that adds no text yet is left out of the stream, id, logprob and count alike."""
    choices = [(event, event["choices"][0]) for event in events if event["choices"]]
    held = [event for event, choice in choices[1:] if choice["text"] == "" and choice["finish_reason"] is None]
    for event in held:
        events.remove(event)
    if (usage := events[-1].get("usage")) is not None:
        usage["completion_tokens"] -= len(held)
        usage["total_tokens"] -= len(held)


@on_events(4, "usage of another request in the last event", wires=VLLM)
def usage_one_too_many(events: Events) -> None:
    """The usage of a stream counts one token more than were sent."""
    if (usage := events[-1].get("usage")) is not None:
        usage["completion_tokens"] += 1


@on_events(4, "output ids cumulative, logprobs incremental: SGLang PR #21583", wires=("sglang",))
def last_logprobs_incremental(events: Events) -> None:
    """The last event has all ids, but only the newest logprob."""
    meta = events[-1]["meta_info"]
    meta["output_token_logprobs"] = meta["output_token_logprobs"][-1:]


@on_events(4, "logprob buffers appended one step late", wires=("sglang",))
def last_logprobs_rolled(events: Events) -> None:
    """In the last event the logprobs are those of the tokens before; earlier events are right."""
    rows = events[-1]["meta_info"]["output_token_logprobs"]
    values = [row[0] for row in rows]
    for row, value in zip(rows, [values[0], *values[:-1]], strict=True):
        row[0] = value


@on_events(4, "one retracted token stays in a cumulative stream", wires=("sglang",))
def one_token_rewritten(events: Events) -> None:
    """A token in the middle differs between the last event and the earlier ones."""
    ids, rows = events[-1]["output_ids"], events[-1]["meta_info"]["output_token_logprobs"]
    at = len(ids) // 2
    ids[at] = rows[at][1] = ids[at - 1]


@on_events(4, "the last interval of a stream is not flushed", wires=("sglang",))
def last_event_lost(events: Events) -> None:
    """The last token is lost: its finish and counts are on the event before."""
    last, before = events.pop(), events[-1]
    before["meta_info"]["finish_reason"] = last["meta_info"]["finish_reason"]
    for name in ("weight_versions", "e2e_latency"):
        before["meta_info"][name] = last["meta_info"][name]
    for span in before["meta_info"]["weight_versions"]:
        span["end"] = min(span["end"], len(before["output_ids"]))


@on_events(4, "a BOS stripped from the echo in one code path", wires=("sglang",))
def echo_loses_its_first_id(events: Events) -> None:
    """In later events the echo of the prompt lacks its first id."""
    for event in events[1:]:
        if event.get("prompt_token_ids"):
            event["prompt_token_ids"] = event["prompt_token_ids"][1:]


STREAMS = [
    *(event_lost, event_repeated, events_swapped, merged_events_share_a_logprob, last_token_lost),
    *(finish_in_the_middle, held_bytes_lose_their_id, usage_one_too_many, last_logprobs_incremental),
    *(last_logprobs_rolled, one_token_rewritten, last_event_lost, echo_loses_its_first_id),
]
