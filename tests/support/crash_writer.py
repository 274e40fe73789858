"""Writers that stream turns of several ledgers into a file and report them, until they are killed.

For each line `PATH PIPE SEED UUID...` on standard input, this script forks a writer and prints its process id. For
`wait PID` it prints that writer's exit code. A writer reports into its pipe, one line each: `ready`; `turn UUID INDEX`
and `note UUID INDEX` after each commit; `sync BYTES` after each fsync, with the file's size before it.
"""

from __future__ import annotations

import os
import random
import sys

import numpy as np

from tito_core.ledger import (
    Columns,
    Draft,
    EngineRecord,
    Finish,
    Ledger,
    Sampling,
    Semantics,
    Server,
    Turn,
    VersionSpan,
)
from tito_core.store import LedgerFile


def draft_of(uuid: str, index: int, before: int) -> Draft:
    """Return turn `index` of a ledger: random tokens that depend on ledger and index only.

    Args:
        uuid: The ledger.
        index: The turn's index.
        before: Number of tokens of the turns before it.
    """
    dice = random.Random(f"{uuid} {index}")
    largest = dice.choice([3, 3, 3, 50, 50, 1_000, 60_000])  # a kill cuts a large turn in the middle
    prompt, output, noise = dice.randint(0, largest), dice.randint(1, largest), dice.getrandbits(20)
    ids = (np.arange(prompt + output, dtype=np.int32) * 7 + noise) % 150_000
    cut = index % 4 % output
    versions = (VersionSpan(0, cut, "v1"), VersionSpan(cut, output, None))
    return Draft(
        columns=Columns.pack(
            ids[:prompt], ids[:prompt].astype(np.uint8) % 3, ids[prompt:], -(ids[prompt:] / 1e5).astype(np.float32)
        ),
        prompt_length=before + prompt,
        finish=Finish.STOP,
        fingerprint=noise.to_bytes(16, "little"),
        sampling=Sampling({"seed": index % 3}),
        max_new_tokens=64,
        engine=EngineRecord(Server("b", "m", Semantics(False, 1.0, False, "test")), "request", 0.25, None, versions),
        parent=index - 1 if index else None,
    )


def commit_next(ledger: Ledger) -> Turn:
    """Commit a ledger's next turn."""
    last = len(ledger) - 1 if len(ledger) else None
    return ledger.commit(draft_of(ledger.uuid, len(ledger), ledger.path_length(last)))


def write(path: str, pipe: str, seed: int, uuids: list[str]) -> None:
    reports = os.open(pipe, os.O_WRONLY)

    def report(*words: object) -> None:
        os.write(reports, (" ".join(map(str, words)) + "\n").encode())

    dice = random.Random(seed)
    with LedgerFile(path, "a") as file:
        known = set(file.uuids)
        ledgers = [file.attach(file.load(uuid) if uuid in known else Ledger(uuid)) for uuid in uuids]
        report("ready")
        while True:
            ledger = dice.choice(ledgers)
            report("turn", ledger.uuid, commit_next(ledger).index)
            if dice.random() < 0.2:
                ledger.annotate("count", len(ledger.annotations))
                report("note", ledger.uuid, len(ledger.annotations) - 1)
            if dice.random() < 0.2:
                size = os.stat(path).st_size
                file.sync()
                report("sync", size)


def main() -> None:
    for line in sys.stdin:
        first, *words = line.split()
        if first == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(int(words[0]), 0)[1]), flush=True)
            continue
        pid = os.fork()
        if not pid:
            try:
                write(first, words[0], int(words[1]), words[2:])
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
