"""One turn. `run` is the outline; the other modules are its steps.

In order: `inputs`, `recording` (which ledger), `history` (where a turn continues; `branch`: why it branches),
`request` (with `prompt`, and `images` if there are any), `generate`, `answer`, and `recording` again, which commits.
"""
