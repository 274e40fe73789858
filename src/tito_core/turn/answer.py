"""An answer: sampled ids become the message that Strands stores, the draft of the turn, and the events that show it.

`ParseReport` counts the calls of a rollout's answers.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec
import numpy as np
from strands.types.content import ContentBlock, Message
from strands.types.event_loop import Metrics, StopReason, Usage
from strands.types.streaming import ContentBlockDelta, StreamEvent

from tito_core.backend.errors import BadRequestError, ProtocolViolationError, UnsupportedByServerError
from tito_core.backend.generate import score
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.validation import check_output_ids, outside_vocabulary
from tito_core.chat.encoder import EncodedText
from tito_core.chat.messages import MALFORMED_CALL, with_sampled_id
from tito_core.chat.rendering import TemplateError
from tito_core.ledger.columns import Columns, TokenIds
from tito_core.ledger.errors import TITOError
from tito_core.ledger.history import extended
from tito_core.ledger.provenance import Provenances
from tito_core.ledger.turn import CallRecord, Draft, EngineRecord, Finish, MediaSpan, Turn
from tito_core.parsing.call_values import shortened
from tito_core.parsing.completion import CallStatus, ParsedCall, ParsedTurn
from tito_core.parsing.registry import ToolParser
from tito_core.parsing.turn import Kind, Piece, PreviewError
from tito_core.policy import PolicyParts
from tito_core.settings import MalformedCalls, Settings
from tito_core.turn.history import as_stored
from tito_core.turn.images import expanded_delta

if TYPE_CHECKING:
    from tito_core.turn.request import Prepared

logger = logging.getLogger(__name__)
_EXCERPT = 120
"""Maximum characters of a call's raw text in an error."""


class MalformedCallError(TITOError, ValueError):
    """The policy made a malformed call, and `malformed_calls="raise"`. No call of the turn was executed.

    The turn is committed, since the policy sampled its tokens (law 5). Strands does not store its message.

    Attributes:
        calls: The malformed calls of the turn.
        turn: The turn's index in the ledger.
        message: The turn as a message, with its calls as raw text. Append it to the agent's messages to continue the
            conversation from the turn.
    """

    def __init__(self, calls: tuple[ParsedCall, ...], turn: int, message: Message) -> None:
        first = calls[0]
        more = f" {len(calls) - 1} more of its calls are malformed." if len(calls) > 1 else ""
        super().__init__(
            f"Law 9: the policy's call of {first.name or 'an unknown tool'} in turn {turn} is malformed and was not "
            f"executed: {first.reason} Its text is {shortened(first.raw, _EXCERPT)}.{more} The turn is committed. Use "
            "malformed_calls='feedback' to show the policy the reason."
        )
        self.calls = calls
        self.turn = turn
        self.message = message


class Answer(msgspec.Struct, frozen=True, eq=False):
    """An answer that was read.

    Attributes:
        message: The message as its events show it.
        stored: The message as Strands will store it.
        draft: The turn, ready to commit.
        stop_reason: Strands' stop reason.
        arguments: The arguments of its calls as the policy wrote them, by `toolUseId`.
        refused: Its malformed calls, where they raise.
        is_unshown: Whether it calls tools, which the chat template cannot show.
    """

    message: Message
    stored: Message
    draft: Draft
    stop_reason: StopReason
    arguments: Mapping[str, str]
    refused: tuple[ParsedCall, ...] = ()
    is_unshown: bool = False

    def refusal(self, turn: int) -> TITOError | None:
        """Return the error that ends turn `turn`, which is committed, in place of events; None for most answers."""
        if self.refused:
            return MalformedCallError(self.refused, turn, self.message)
        if self.is_unshown:
            return TemplateError(
                f"The policy called a tool in turn {turn}, and the chat template shows no calls and results, so no "
                "tool ran. The turn is committed. Use a template that shows them, or an agent without tools."
            )
        return None


def read_answer(
    policy: PolicyParts,
    prepared: Prepared,
    response: TokenResponse,
    next_call_id: Callable[[], str],
    settings: Settings = Settings(),  # noqa: B008  # frozen
    agent: str | None = None,
) -> Answer:
    """Return the message that Strands will store and the draft of the turn.

    Raises:
        ProtocolViolationError: The grammar of the request was not applied (law 4): the answer does not hold the forced
            call, or is no JSON.
    """
    parsed = parse(policy, prepared, response)
    check_forced_call(policy, prepared, response, parsed)
    check_json(policy, prepared, response)
    runs_calls = settings.runs_calls or prepared.forced is not None
    message = assistant_message(parsed, response.finish, next_call_id, settings.malformed_calls, runs_calls)
    stored = as_stored(message)
    drafted = draft(policy, prepared, response, stored, parsed, agent)
    reason = stop_reason(message, response)
    refused = malformed_of(parsed) if settings.malformed_calls == "raise" else ()
    is_unshown = reason == "tool_use" and not policy.template.certificate.tools
    return Answer(message, stored, drafted, reason, sampled_arguments(message, parsed), refused, is_unshown)


def parse(policy: PolicyParts, prepared: Prepared, response: TokenResponse) -> ParsedTurn:
    """Parse reasoning, text and calls from the sampled ids.

    A call with the reserved name is malformed, and so is each after the first under a template that shows one (law 9).
    """
    session = policy.parser.start(prepared.prompt_tail, prepared.tools)
    session.feed(response.output_ids.tolist())
    parsed = session.finish(truncated=response.finish.cut_off)
    one_call = policy.template.rendering.message_format.one_call and not response.finish.cut_off
    if not one_call and all(call.name != MALFORMED_CALL for call in parsed.calls):
        return parsed
    return replace(parsed, calls=tuple(_checked(call, one_call and i > 0) for i, call in enumerate(parsed.calls)))


def _checked(call: ParsedCall, unshown: bool) -> ParsedCall:
    if not call.status.runs or not (unshown or call.name == MALFORMED_CALL):
        return call
    reason = _ONE_CALL if unshown else f"{MALFORMED_CALL} is not a tool."
    return replace(call, status=CallStatus.MALFORMED, arguments=None, arguments_text=None, reason=reason)


_ONE_CALL = "The chat template shows one call in an answer. Make the next call after its result."


def malformed_of(parsed: ParsedTurn) -> tuple[ParsedCall, ...]:
    """Return the malformed calls of a turn."""
    return tuple(call for call in parsed.calls if call.status == CallStatus.MALFORMED)


def with_stop(policy: PolicyParts, request: TokenRequest, response: TokenResponse) -> TokenResponse:
    """Return a response with the stop that ended it, where the server did not report one (vLLM up to 0.31).

    It is the stop string that the text completes first. Without any, it is the last token id, a stop that only the
    server's model configuration names. A reported stop string must be in the text of the sampled ids. Blanks
    beside others are not compared, because servers decode the last tokens alone, where some tokenizers drop them; nor
    are patterns.

    Raises:
        ProtocolViolationError: It is not (law 4).
    """
    stop = response.stop
    if response.finish != Finish.STOP or isinstance(stop, int) or (stop and stop in request.sampling.stop_patterns):
        return response
    text = str(policy.tokenizer.decode(response.output_ids.tolist()))
    if stop is not None:
        known = len(policy.tokenizer)  # the server may show any text for an id without a token
        bare = "".join(stop.split())
        holds = bare in "".join(text.split()) if bare else stop in text or not text.strip()
        if holds or int(response.output_ids.max()) >= known:
            return response
        raise ProtocolViolationError(
            f"Law 4: {policy.backend.name} reported that the stop string {stop!r} ended the output, but its text is "
            f"{shortened(text, _EXCERPT)}. The answer was discarded. Check the server and any proxy in front of it.",
            backend=policy.backend.name,
            request_id=request.request_id,
        )
    ends = {text.find(stop) + len(stop): stop for stop in request.sampling.stop if stop in text}
    return replace(response, stop=ends[min(ends)] if ends else int(response.output_ids[-1]))


async def check_sampled_ids(policy: PolicyParts, request: TokenRequest, response: TokenResponse) -> None:
    """Check that the server accepts the sampled ids in a prompt, before their turn is committed.

    Ids past the client's tokenizer are legal: embeddings are padded, and their rows can be sampled. Where the server
    does not report its number of rows, it scores a prompt that holds the largest such id.

    Raises:
        ProtocolViolationError: An id is outside the server's vocabulary (law 4).
        BackendError: The server could not be reached.
    """
    largest = int(np.maximum.reduce(response.output_ids, initial=0))
    backend, rows = policy.backend, policy.info.vocab_size
    if largest < policy.template.encoder.vocab_size:
        return
    check_output_ids(response.output_ids, rows, backend=backend.name, request_id=request.request_id)
    if rows is not None:
        return
    try:
        await score(backend, [int(request.input_ids[0]), largest])
    except UnsupportedByServerError:
        logger.warning(
            "output_id=<%d>, backend=<%s> | past the tokenizer's vocabulary, and the server cannot check it",
            largest,
            backend.name,
        )
    except BadRequestError as error:
        raise outside_vocabulary(
            largest, "(it refuses the id in a prompt)", backend.name, request.request_id
        ) from error


def check_forced_call(policy: PolicyParts, prepared: Prepared, response: TokenResponse, parsed: ParsedTurn) -> None:
    """Check that an answer that ended by itself holds the call that was forced. One that is malformed is a call too.

    Raises:
        ProtocolViolationError: It holds none: the server did not apply the grammar of the request (law 4).
    """
    forced = prepared.forced
    if not forced or response.finish.cut_off or any(call.name in (None, *forced) for call in parsed.calls):
        return
    if prepared.takes_json and _is_json(parsed.text):
        return
    raise _grammar_ignored(policy, prepared, response, f"a call of {' or '.join(forced[:5])} was forced by a grammar")


def check_json(policy: PolicyParts, prepared: Prepared, response: TokenResponse) -> None:
    """Check that an answer under a JSON schema that ended by itself is JSON.

    Engines leave out some of what a schema forbids, so only the JSON is certain.

    Raises:
        ProtocolViolationError: It is none: the server, or a proxy before it, dropped the grammar (law 4).
    """
    grammar, stop = prepared.request.sampling.grammar, response.stop
    if grammar is None or grammar.kind != "json_schema" or response.finish.cut_off or isinstance(stop, str):
        return
    ids = response.output_ids.tolist()
    if not _is_json(str(policy.tokenizer.decode(ids[:-1] if ids[-1] == stop else ids))):
        raise _grammar_ignored(policy, prepared, response, "the answer must be JSON by a grammar")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, strict=False, parse_int=str)  # numbers of any length; control characters, as engines allow
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _grammar_ignored(
    policy: PolicyParts, prepared: Prepared, response: TokenResponse, wanted: str
) -> ProtocolViolationError:
    text = str(policy.tokenizer.decode(response.output_ids.tolist()))
    return ProtocolViolationError(
        f"Law 4: {wanted}, but {policy.backend.name} answered {shortened(text, _EXCERPT)}. The answer was discarded: "
        "the server did not apply the grammar. Check its grammar backend and its reasoning parser, and any proxy in "
        "front of it, which may drop parameters.",
        backend=policy.backend.name,
        request_id=prepared.request.request_id,
    )


def draft(
    policy: PolicyParts,
    prepared: Prepared,
    response: TokenResponse,
    stored: Message,
    parsed: ParsedTurn,
    agent: str | None = None,
) -> Draft:
    """Return the draft of an answered turn, ready to commit; `stored` is its message as Strands stores it."""
    request, match = prepared.request, prepared.match
    ids, provenance, media = read_delta(prepared.delta, request.images, response)
    calls = [CallRecord(c.name, str(c.status), c.start, c.stop, c.reason) for c in parsed.records]
    if media_ids := policy.template.certificate.media_ids:
        calls += sampled_placeholders(response.output_ids, media_ids)
    recorded = policy._samplings.recorded(request.sampling, policy.backend.name, policy.info)
    return Draft(
        parent=match.parent,
        columns=Columns.pack(ids, provenance, response.output_ids, response.logprobs),
        constrained=request.sampling.grammar is not None,
        prompt_length=response.prompt_length,
        finish=response.finish,
        stop=response.stop,
        fingerprint=extended(match.history.digest, stored),
        max_new_tokens=request.sampling.max_new_tokens,
        sampling=recorded.sampling,
        reasoning_closed=parsed.reasoning_closed,
        branch=match.branch,
        calls=tuple(calls),
        media=media,
        engine=EngineRecord(
            server=recorded.server,
            request_id=response.request_id,
            latency_s=response.latency_s,
            cached_tokens=response.cached_tokens,
            versions=response.versions,
            responses=response.responses,
            finish_word=response.finish_word,
            unordered=response.unordered,
            echoed_from=response.echoed_from,
        ),
        extras=response.columns,
        agent=agent,
        adapter=request.adapter,
    )


def read_delta(
    delta: EncodedText, images: PromptImages | None, response: TokenResponse
) -> tuple[TokenIds, Provenances, tuple[MediaSpan, ...]]:
    """Return a turn's delta as the server read it: its ids, their provenance, and the spans of its images."""
    if images is None or not images.new:
        return delta.ids, delta.provenance, ()
    return expanded_delta(delta, images, response)


def sampled_placeholders(output_ids: TokenIds, media_ids: tuple[int, ...]) -> list[CallRecord]:
    """Return a record for each media placeholder that the policy sampled; no request after it may carry images."""
    reason = "The policy sampled a media placeholder; later requests of this path may not carry images."
    found = np.flatnonzero(np.isin(output_ids, media_ids))
    return [CallRecord(None, "suspect", int(at), int(at) + 1, reason) for at in found]


def assistant_message(
    parsed: ParsedTurn,
    finish: Finish,
    next_call_id: Callable[[], str],
    malformed: MalformedCalls = "feedback",
    runs_calls: bool = True,
) -> Message:
    """Return the message that Strands will store. It keeps the raw text of every call.

    Blank text is left out, since Strands drops or rewrites it. All calls stay text, and none runs, in three cases: the
    answer was cut off (Strands would rewrite them), one is malformed and `malformed` is not "feedback", or `runs_calls`
    is False.
    """
    content: list[ContentBlock] = []
    if parsed.early_reasoning.strip():
        content.append(_reasoning(parsed.early_reasoning))
    text = parsed.text
    as_text = finish.cut_off or not runs_calls or (malformed != "feedback" and bool(malformed_of(parsed)))
    if as_text:
        text = "\n".join([text, *(call.raw for call in parsed.calls)]).strip()
    if text.strip():
        content.append({"text": text})
    if parsed.late_reasoning.strip():
        content.append(_reasoning(parsed.late_reasoning))
    if not as_text:
        content += [_tool_use(call, next_call_id()) for call in parsed.calls]
    return {"role": "assistant", "content": content}


def _reasoning(text: str) -> ContentBlock:
    return {"reasoningContent": {"reasoningText": {"text": text}}}


def _tool_use(call: ParsedCall, call_id: str) -> ContentBlock:
    if call.status.runs and call.name is not None:
        arguments = dict(call.arguments or {})
        return {"toolUse": {"toolUseId": with_sampled_id(call_id, call.id), "name": call.name, "input": arguments}}
    # Strands would run a tool with {} for broken arguments; under a name that no tool has, nothing runs. The input must
    # be a mapping, since Strands' module tools accept lists and strings.
    report = {"reason": call.reason, "raw": call.raw}
    if call.name is not None:
        report["name"] = call.name
    return {"toolUse": {"toolUseId": call_id, "name": MALFORMED_CALL, "input": report}}


def sampled_arguments(message: Message, parsed: ParsedTurn) -> dict[str, str]:
    """Return each call's arguments by `toolUseId`, as the policy wrote them, where they are JSON."""
    uses = (block["toolUse"]["toolUseId"] for block in message["content"] if "toolUse" in block)
    written = zip(uses, parsed.calls, strict=False)  # no uses when the calls stay text
    return {use: call.arguments_text for use, call in written if call.arguments_text is not None}


def _is_not_malformed(record: logging.LogRecord) -> bool:
    """Return whether a log record of Strands is about a tool: it has none for malformed calls, which is no fault."""
    return not (isinstance(record.args, tuple) and record.args[:1] == (MALFORMED_CALL,))


# A model cannot register hooks with an agent, and Strands reports each call without a tool as an error.
logging.getLogger("strands.tools.executors._executor").addFilter(_is_not_malformed)


class Previewing(Protocol):
    """Shows a completion while it is sampled; see `Preview`."""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """Take the next sampled ids; return the pieces that they make certain."""


class StreamedEvents:
    """The events of one answer while it is sampled: its reasoning and text. Calls follow once it is complete.

    Args:
        parser: The policy's parser. One without `preview(prompt_tail)` shows nothing before the end.
        prompt_tail: The last ids of the prompt.
    """

    def __init__(self, parser: ToolParser, prompt_tail: Sequence[int]) -> None:
        self._parser, self._prompt_tail = parser, prompt_tail
        self._blocks: list[tuple[Kind, list[str]]] = []

    @property
    def blocks(self) -> list[Piece]:
        """The blocks streamed so far; the last one is still open."""
        return [Piece(kind, "".join(texts)) for kind, texts in self._blocks]

    @functools.cached_property
    def _preview(self) -> Previewing | None:
        begin = getattr(self._parser, "preview", None)
        return None if begin is None else cast(Previewing, begin(self._prompt_tail))

    def feed(self, chunk: TokenChunk) -> Iterator[StreamEvent]:
        """Yield the events of the pieces that a chunk makes certain."""
        for piece in [] if self._preview is None else self._preview.feed(chunk.output_ids.tolist()):
            if not self._blocks:
                yield {"messageStart": {"role": "assistant"}}
            if not self._blocks or self._blocks[-1][0] != piece.kind:
                if self._blocks:
                    yield {"contentBlockStop": {}}
                yield {"contentBlockStart": {"start": {}}}
                self._blocks.append((piece.kind, []))
            self._blocks[-1][1].append(piece.text)
            yield {"contentBlockDelta": {"delta": delta_of(piece)}}


def stop_reason(message: Message, response: TokenResponse) -> StopReason:
    """Return Strands' stop reason; with a call it is `tool_use` even after a stop string, so that the call runs."""
    if response.finish.cut_off:
        return "max_tokens"
    if any("toolUse" in block for block in message["content"]):
        return "tool_use"
    return "stop_sequence" if isinstance(response.stop, str) else "end_turn"


def events(
    answer: Answer,
    response: TokenResponse,
    began: float,
    streamed_blocks: Sequence[Piece] = (),
    prompt_ids: TokenIds | None = None,
) -> Iterator[StreamEvent]:
    """Yield the events of one answer, the last one with usage and latency; none of one that is refused.

    The latency is that of the whole turn, as Strands' time to the first token is counted from the turn's beginning too.
    The server's own is `engine.latency_s` of the recorded turn.

    Args:
        answer: The answer.
        response: The engine's response.
        began: The time of `time.monotonic` at which the model was called.
        streamed_blocks: The blocks that were streamed before, the last one still open; see `StreamedEvents.blocks`.
        prompt_ids: The ids of the prompt, to be shown with those of the answer and its logprobs; None to show none.

    Raises:
        PreviewError: The answer does not start with `streamed_blocks`.
    """
    if answer.refused or answer.is_unshown:
        return
    content = answer.message["content"]
    _check_preview(content, streamed_blocks)
    if not streamed_blocks:
        yield {"messageStart": {"role": "assistant"}}
    first = max(0, len(streamed_blocks) - 1)
    for number, block in enumerate(content[first:], first):
        if number < len(streamed_blocks):
            rest = _text_of(block)[len(streamed_blocks[number].text) :]
            if rest:
                yield {"contentBlockDelta": {"delta": delta_of(Piece(streamed_blocks[number].kind, rest))}}
        else:
            start, delta = _block_events(block, answer.arguments)
            yield {"contentBlockStart": {"start": start}}
            yield {"contentBlockDelta": {"delta": delta}}
        yield {"contentBlockStop": {}}
    if prompt_ids is None:
        yield {"messageStop": {"stopReason": answer.stop_reason}}
    else:
        yield _with_ids(answer.stop_reason, prompt_ids, response)
    sampled = len(response.output_ids)
    usage: Usage = {
        "inputTokens": response.prompt_length,
        "outputTokens": sampled,
        "totalTokens": response.prompt_length + sampled,
    }
    if response.cached_tokens is not None:
        usage["cacheReadInputTokens"] = response.cached_tokens
    metrics: Metrics = {"latencyMs": math.ceil((time.monotonic() - began) * 1000)}
    yield {"metadata": {"usage": usage, "metrics": metrics}}


def _with_ids(reason: StopReason, prompt_ids: TokenIds, response: TokenResponse) -> StreamEvent:
    """Return the event that ends a message, with the turn's ids and logprobs as lists, for callbacks."""
    fields: dict[str, Any] = {
        "prompt_token_ids": prompt_ids.tolist(),
        "token_ids": response.output_ids.tolist(),
        "logprobs": response.logprobs.tolist(),
    }
    return {"messageStop": {"stopReason": reason, "additionalModelResponseFields": fields}}


def delta_of(piece: Piece) -> ContentBlockDelta:
    """Return the delta that appends to a block of text or reasoning."""
    return {"text": piece.text} if piece.kind == "text" else {"reasoningContent": {"text": piece.text}}


def _check_preview(content: Sequence[ContentBlock], streamed_blocks: Sequence[Piece]) -> None:
    for number, piece in enumerate(streamed_blocks):
        whole = _text_of(content[number]) if number < len(content) else ""
        kind = "text" if number < len(content) and "text" in content[number] else "reasoning"
        ended = number < len(streamed_blocks) - 1
        if piece.kind != kind or not whole.startswith(piece.text) or (ended and whole != piece.text):
            raise PreviewError(
                f"The parser's preview streamed the {piece.kind} {piece.text[-80:]!r}, but the complete answer has "
                f"{whole[:80]!r} there. The turn was not committed. Set stream=False, and fix the parser's preview."
            )


def _text_of(block: ContentBlock) -> str:
    if "reasoningContent" in block:
        return block["reasoningContent"]["reasoningText"]["text"]
    return block.get("text", "")


def _block_events(block: ContentBlock, arguments: Mapping[str, str]) -> tuple[Any, Any]:
    if "toolUse" in block:
        use = block["toolUse"]
        start = {"toolUse": {"toolUseId": use["toolUseId"], "name": use["name"]}}
        written = arguments.get(use["toolUseId"]) or json.dumps(use["input"], ensure_ascii=False)
        return start, {"toolUse": {"input": written}}
    return {}, delta_of(Piece("reasoning" if "reasoningContent" in block else "text", _text_of(block)))


_VALUES = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|"[^"]*'[^"]*"|\d+""")


def kind_of(reason: str) -> str:
    """Return the kind of fault of a call's reason: the sentence without its values, up to the first colon."""
    return _VALUES.sub("…", reason).split(":")[0].rstrip(". ")


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Call counts of one tool.

    Attributes:
        ok: Well-formed calls, whether or not the tool exists.
        truncated: Calls that the token limit cut off.
        malformed: Malformed calls by kind of fault, most common first. Loose calls are malformed with
            `tool_calls="strict"`.
        lenient: Loose calls that ran with `tool_calls="lenient"`, by kind of fault, most common first.
        suspect: Texts that look like calls but are not; not in `total`.
    """

    ok: int = 0
    truncated: int = 0
    malformed: Mapping[str, int] = field(default_factory=dict)
    lenient: Mapping[str, int] = field(default_factory=dict)
    suspect: int = 0

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> CallCounts:
        """Count calls by status."""
        statuses: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {CallStatus.MALFORMED: Counter(), CallStatus.LENIENT: Counter()}
        for call in calls:
            statuses[call.status] += 1
            if call.status in kinds:
                kinds[call.status][kind_of(call.reason)] += 1
        malformed, lenient = (dict(counter.most_common()) for counter in kinds.values())
        return cls(
            statuses[CallStatus.OK],
            statuses[CallStatus.TRUNCATED],
            malformed,
            lenient,
            statuses[CallStatus.SUSPECT],
        )

    @property
    def total(self) -> int:
        """All calls, without `suspect`."""
        return self.ran + self.truncated + sum(self.malformed.values())

    @property
    def ran(self) -> int:
        """Calls that ran."""
        return self.ok + sum(self.lenient.values())


@dataclass(frozen=True, slots=True)
class ParseReport:
    """Call counts of a rollout. A snapshot: read `model.parse_report` again after later turns.

    Attributes:
        tools: Counts by tool name; None for calls whose name the tokens do not give.
        all: Counts of all calls.
    """

    tools: Mapping[str | None, CallCounts]
    all: CallCounts

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> ParseReport:
        """Count the calls of a ledger, or of some of its turns."""
        by_name: dict[str | None, list[CallRecord]] = {}
        for turn in turns:
            for call in turn.draft.calls:
                by_name.setdefault(call.name, []).append(call)
        total = CallCounts.of(call for calls in by_name.values() for call in calls)
        return cls({name: CallCounts.of(calls) for name, calls in by_name.items()}, total)

    def __str__(self) -> str:
        lines = [f"{self.all.ran} of {self.all.total} calls are well-formed"]
        for name, counts in self.tools.items():
            faults = [f"{number} lenient ({kind})" for kind, number in counts.lenient.items()]
            faults += [f"{number} malformed ({kind})" for kind, number in counts.malformed.items()]
            faults += [f"{counts.truncated} truncated"] if counts.truncated else []
            faults += [f"{counts.suspect} suspect"] if counts.suspect else []
            lines.append(f"{'unknown tool' if name is None else name}: {', '.join([f'{counts.ok} ok', *faults])}")
        return "\n".join(lines)
