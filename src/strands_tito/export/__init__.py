"""Exporters: turn a rollout (a ledger) into the types that a trainer takes.

    from strands_tito.export import samples_of
    from strands_tito.export.batch import padded

    batch = padded(samples_of(ledger), pad_id=tokenizer.pad_token_id)

`samples_of` flattens a ledger to `TrainingSample`s, one for each trajectory. Each trainer has one module here that
builds the trainer's own type from a sample: `slime`, `verl`, `trl`, `skyrl`, `tinker`, `agent_lightning`, `verifiers`.
`batch`, `parquet` and `hf` serve every other trainer. Importing a module imports no trainer; calling its
functions does.

To add an exporter for the trainer "acme", that is for its types or its own format of files (in a module outside this
package without step 5; call it for `samples_of(ledger)` of each ledger of `store.read(path)`, as `tito export` does not
know it):

1. Write `acme.py` in this folder with one function that takes a `TrainingSample` (or a `Ledger`) and returns the
   trainer's type. `tinker.py` is the shortest example. For a trainer that assembles trajectories from turns, start
   from `trainer.trained_turns`, as `agent_lightning.py` does. It checks the logprobs in place of step 3.
2. Import the trainer inside that function: `acme = trainer.import_optional("acme", "acme")`. The second argument names
   the extra in `pyproject.toml` that installs it; leave it out if no extra does.
3. Take logprobs from `trainer.logprobs_for(sample, temperature=..., trainer="acme", policy=...)`. It refuses those that
   are not the quantity that the trainer computes (law 11).
4. Train exactly the tokens where `loss_mask` is 1, and no token when `sample.ended_outside` is true. Put
   `sample.credit` where the trainer takes a reward a token, else give it `sample.total`. Where that is None, pass null
   if the trainer takes it, else train nothing. For a trainer that takes one prompt and one response per rollout,
   `trainer.prompt_response_of` does steps 3 and 4.
   For images it needs `takes_images=True`, and puts `images` where the trainer takes them; an exporter for a trainer
   that does not calls `trainer.refuse_images`: tokens are never trained without their images.
5. Test it with the random rollouts of `tests/support/rollout_forests.py`, run it through the trainer's own code in
   `tests/export/real/`, and add it to the tables in `docs/trainers.md`, whose cells name their tests in
   `tests/export/test_page.py`, the module to `docs/api/strands_tito.md`, and the trainer to `TRAINERS` in
   `tools/matrix.py`. Nothing has to be registered, but `_ROWS` in `files.py` lists what `tito export --to` writes.

A file for any trainer is another thing, as `parquet.py` writes it: it keeps null, semantics and termination, and writes
every sample, so that steps 3 and 4 do not apply. Logprobs are null on tokens that the engine did not sample.
"""

from strands_tito.export.sample import (
    BranchedRolloutError,
    Identity,
    SampleImage,
    TrainingSample,
    sample_of,
    samples_of,
    trained_tokens,
)
from strands_tito.export.trainer import (
    ImageGridError,
    ImagesNotSupportedError,
    LogprobMismatchError,
    MissingPackageError,
    SampledPlaceholderError,
    UnreadRewardError,
    import_optional,
    logprobs_for,
)

__all__ = [
    "BranchedRolloutError",
    "Identity",
    "ImageGridError",
    "ImagesNotSupportedError",
    "LogprobMismatchError",
    "MissingPackageError",
    "SampleImage",
    "SampledPlaceholderError",
    "TrainingSample",
    "UnreadRewardError",
    "import_optional",
    "logprobs_for",
    "sample_of",
    "samples_of",
    "trained_tokens",
]
