"""Run the suite on the stranger's defects, which a hand planted that had not seen what the suite checks.

    python tools/strangers.py --out runs/strangers.jsonl [--only NAME ...] [--wires WIRE ...] [--one-wire] [--differ]

It prints a line for each defect and wire: what caught it, or MISSED. With --differ no suite runs: each defect's answers
are compared with a sound server's. Runs already in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conformance.defects.defect import SERVERS
from conformance.defects.stranger_backends import BACKENDS, SOUND_BACKEND, try_backend
from conformance.defects.stranger_clients import CLIENTS
from conformance.defects.stranger_differs import differs
from conformance.defects.stranger_hooks import Planted
from conformance.defects.stranger_proxied import PROXIES, try_proxy
from conformance.defects.stranger_servers import SERVERS_DEFECTS
from conformance.defects.trial import Verdict, try_defect
from tito_conformance.checks import PROFILES
from tito_engines import models

BY_NAME: dict[str, Planted] = {
    each.name: each for each in (*SERVERS_DEFECTS, *CLIENTS, *BACKENDS, *PROXIES, SOUND_BACKEND)
}
Case = tuple[str, str]


@cache
def tokenizer() -> Any:
    """Load the tokenizer, once for each process."""
    return models.load_tokenizer("smollm2")


def judged(case: Case, profile: str, limit_s: int) -> Verdict:
    """Run the suite on one case, for at most so many seconds."""
    name, wire = case
    defect, end = BY_NAME[name], int(tokenizer().eos_token_id)

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {limit_s} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        if wire == "toy":
            return try_backend(defect, tokenizer(), end, PROFILES[profile])
        if wire.startswith("proxy"):
            return try_proxy(defect, wire, tokenizer(), end, PROFILES[profile])
        return try_defect(defect, wire, tokenizer(), end, PROFILES[profile])
    except Exception as error:  # a crash of the suite is a finding too
        return Verdict(name, wire, type(error).__name__, str(error)[:300], 0, expected=False)
    finally:
        signal.alarm(0)


def cases(only: list[str], wires: list[str], groups: list[str]) -> list[Case]:
    """Return the cases that were asked for."""
    return [
        (name, wire)
        for name, defect in BY_NAME.items()
        if defect.group != "sound" or name in only
        for wire in defect.wires
        if (not only or name in only) and (not wires or wire in wires) and (not groups or defect.group in groups)
    ]


def show(verdict: Verdict) -> str:
    """Return one line of the table."""
    defect = BY_NAME[verdict.defect]
    caught = verdict.caught_by or ("MISSED (hard)" if defect.hard else "MISSED")
    caught += "" if verdict.expected else " (crash)"
    return f"{defect.group:10} {verdict.defect:38} {verdict.wire:17} {caught:32} {verdict.problem[:80]!r}"


def shares(verdicts: list[Verdict]) -> str:
    """Return the share that was caught, by class and wire, without hard ones, and every miss."""
    groups: Counter[tuple[str, str]] = Counter()
    caught: Counter[tuple[str, str]] = Counter()
    for verdict in verdicts:
        if BY_NAME[verdict.defect].hard:
            continue
        for key in ((BY_NAME[verdict.defect].group, "all"), ("all", verdict.wire), ("all", "all")):
            groups[key] += 1
            caught[key] += verdict.caught_by is not None and verdict.expected
    lines = [f"{group:10} {wire:17} {caught[group, wire]}/{count}" for (group, wire), count in groups.items()]
    missed: dict[str, list[str]] = {}
    for verdict in verdicts:
        if verdict.caught_by is None or not verdict.expected:
            missed.setdefault(verdict.defect, []).append(verdict.wire)
    for name, wires in missed.items():
        mark = " (hard)" if BY_NAME[name].hard else ""
        lines.append(f"missed{mark}: {name} [{', '.join(wires)}]: {BY_NAME[name].what}")
    return "\n".join(lines)


def main() -> int:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/strangers.jsonl"), help="JSON lines of the verdicts")
    parser.add_argument("--only", nargs="*", default=[], help="names of defects")
    parser.add_argument("--wires", nargs="*", default=[], help="wires; toy for third-party backends")
    parser.add_argument("--groups", nargs="*", default=[], help="classes of defects")
    parser.add_argument("--profile", default="quick", choices=sorted(PROFILES))
    parser.add_argument("--limit", type=int, default=120, help="seconds for one case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--one-wire", action="store_true", help="each defect on one of its wires, in rotation")
    parser.add_argument("--differ", action="store_true", help="compare answers with a sound server's instead")
    parser.add_argument("--summary", action="store_true", help="only the shares of the verdicts in the file")
    arguments = parser.parse_args()
    asked = cases(arguments.only, arguments.wires, arguments.groups)
    if arguments.one_wire:
        asked = [(name, each.wires[n % len(each.wires)]) for n, (name, each) in enumerate(BY_NAME.items())]
        asked = [case for case in asked if case in cases(arguments.only, arguments.wires, arguments.groups)]
    if arguments.differ:
        return differ([case for case in asked if case[1] in SERVERS and BY_NAME[case[0]].group != "clients"])
    known = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    verdicts = {(each["defect"], each["wire"]): Verdict(**each) for each in known if each["defect"] in BY_NAME}
    new = [] if arguments.summary else [case for case in asked if case not in verdicts]
    arguments.out.parent.mkdir(exist_ok=True, parents=True)
    with ProcessPoolExecutor(arguments.jobs) as pool, arguments.out.open("a") as file:
        started = time.monotonic()
        futures = (pool.submit(judged, case, arguments.profile, arguments.limit) for case in new)
        for verdict in (future.result() for future in list(futures)):
            verdicts[verdict.defect, verdict.wire] = verdict
            file.write(json.dumps(asdict(verdict)) + "\n")
            file.flush()
            print(f"{time.monotonic() - started:6.0f} {show(verdict)}", flush=True)
    print(shares([verdict for case, verdict in verdicts.items() if case in asked]))
    return 0


def differ(asked: list[Case]) -> int:
    """Print how many answers of each defect differ from a sound server's; return 1 if none do."""
    same = []
    for name, wire in asked:
        changed, count = differs(BY_NAME[name], wire, tokenizer(), int(tokenizer().eos_token_id))
        print(f"{name:38} {wire:17} {changed:4} of {count}", flush=True)
        same += [] if changed else [(name, wire)]
    print(f"{len(same)} change nothing: {same}")
    return 1 if same else 0


if __name__ == "__main__":
    sys.exit(main())
