"""Processes that stream turns of several ledgers into a file, and tell what they did, until somebody kills them.

This script forks one for each line on its standard input, `PATH PIPE SEED UUID...`, and answers with its process id;
for `wait PID` it answers with how that one ended. A writer says into its pipe, a line each: `ready`; `turn UUID INDEX`
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
    """Give the turn that a ledger has in this place, large or small, whoever asks: a chain of its own random tokens.

    Args:
        uuid: The ledger.
        index: The place.
        before: Tokens of the turns before it.
    """
    dice = random.Random(f"{uuid} {index}")
    largest = dice.choice([3, 3, 3, 50, 50, 1_000, 60_000])  # a large turn is one that a kill cuts in the middle
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


def go_on(ledger: Ledger) -> Turn:
    """Commit a ledger's next turn."""
    last = len(ledger) - 1 if len(ledger) else None
    return ledger.commit(draft_of(ledger.uuid, len(ledger), ledger.path_length(last)))


def write(path: str, pipe: str, seed: int, uuids: list[str]) -> None:
    told = os.open(pipe, os.O_WRONLY)

    def tell(*words: object) -> None:
        os.write(told, (" ".join(map(str, words)) + "\n").encode())

    dice = random.Random(seed)
    with LedgerFile(path, "a") as file:
        known = set(file.uuids)
        ledgers = [file.attach(file.load(uuid) if uuid in known else Ledger(uuid)) for uuid in uuids]
        tell("ready")
        while True:
            ledger = dice.choice(ledgers)
            tell("turn", ledger.uuid, go_on(ledger).index)
            if dice.random() < 0.2:
                ledger.annotate("count", len(ledger.annotations))
                tell("note", ledger.uuid, len(ledger.annotations) - 1)
            if dice.random() < 0.2:
                size = os.stat(path).st_size
                file.sync()
                tell("sync", size)


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
