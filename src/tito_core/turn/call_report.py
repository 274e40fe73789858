"""Counts of well-formed and malformed tool calls of a rollout, by tool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tito_core.ledger.turn import CallRecord, Turn
from tito_core.parsing.parsed import CallStatus

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
