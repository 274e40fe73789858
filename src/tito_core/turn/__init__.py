"""One turn. `run` is the outline and commits; the other modules are its steps.

In order: `inputs`, `history` (where a turn continues), `request` (with `prompt`, and `images` if there are any),
`generate`, `answer`.
"""
