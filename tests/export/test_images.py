"""Exporters take images with their tokens, check the number of tokens, or refuse: none trains tokens without them."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strands_tito.export import (
    ImageGridError,
    ImagesNotSupportedError,
    SampledPlaceholderError,
    TrainingSample,
    samples_of,
)
from strands_tito.export.batch import packed, padded
from strands_tito.export.files import ExportOptions, write
from strands_tito.export.parquet import samples_in, schema, table_of
from strands_tito.export.sample import SampleImage, images_of
from strands_tito.export.slime import fields_of
from strands_tito.export.tinker import datum_of
from strands_tito.export.trainer import (
    check_grid,
    processed,
    prompt_response_of,
    refuse_ledger_images,
    trained_turns,
)
from strands_tito.export.verifiers import trace_of
from strands_tito.export.verl import output_of
from strands_tito.integrations.trl import columns_of
from support.drafts import engine_record, make_draft
from support.picture_ledgers import PAD, seen, two_images
from support.slime_facts import CONTRACT
from tito_conformance.testing.pictures import picture
from tito_core.backend.images import media_ids_of
from tito_core.ledger import Columns, Image, Ledger, MediaSpan
from tito_core.ledger.turn import Branch, Reason

TWO = two_images()
OPTIONS: dict[str, Any] = {"temperature": 1.0, "logprobs": "as-recorded"}


def sample() -> TrainingSample:
    [found] = samples_of(TWO)
    return found


def traces_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let verifiers' trace be the mapping that it would validate, and return the class of its nodes."""
    node: Any = type("Node", (), {"model_fields": {}})
    fields = {"nodes": SimpleNamespace(annotation=list[node])}
    trace = SimpleNamespace(model_fields=fields, model_validate=lambda value: value)
    monkeypatch.setattr("strands_tito.export.verifiers.import_optional", lambda *_: SimpleNamespace(WireTrace=trace))
    return node


def test_images_are_placed_in_the_columns_of_the_sample() -> None:
    found = sample()
    assert [(each.offset, each.length) for each in found.images] == [(1, 4), (9, 2)]
    assert [each.image.data for each in found.images] == [picture(0), picture(1)]
    for each in found.images:
        assert (found.token_ids[each.offset : each.stop] == PAD).all()
        assert not found.loss_mask[each.offset : each.stop].any()


def test_a_ledger_without_the_files_has_no_sample() -> None:
    """Such as one that was written before images had files."""
    trajectory: Any = SimpleNamespace(images=(), media=(MediaSpan(1, 1, bytes(32)),))
    with pytest.raises(ValueError, match=r"has 1 images.*files of 0"):
        images_of(trajectory)


@pytest.mark.parametrize(
    "export",
    [
        lambda: prompt_response_of(sample(), trainer="SkyRL", **OPTIONS),
        lambda: columns_of([TWO], end_id=2, **OPTIONS),
        lambda: datum_of(sample(), advantage=1.0),
        lambda: list(trained_turns(TWO, trainer="Agent Lightning", **OPTIONS)),
        lambda: padded([sample()], pad_id=0),
        lambda: packed([sample()], pad_id=0, length=64),
        lambda: fields_of(sample(), decode=str, **OPTIONS),
        lambda: refuse_ledger_images(TWO, "an old version"),
    ],
    ids=["skyrl", "trl", "tinker", "agent-lightning", "padded", "packed", "slime without a processor", "ledger"],
)
def test_trainers_that_would_drop_images_refuse_them(export: Any) -> None:
    with pytest.raises(ImagesNotSupportedError, match=rf"{TWO.uuid} has 2 images.*output_of.*parquet"):
        export()


@pytest.mark.parametrize("turn", [0, 1])
def test_no_trainer_puts_images_at_sampled_placeholders(turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = two_images(stray=turn)
    [found] = samples_of(ledger)
    traces_of(monkeypatch)
    for export in (
        lambda: prompt_response_of(found, trainer="verl", takes_images=True, **OPTIONS),
        lambda: fields_of(found, decode=str, processor=ImageProcessor([4, 2]), **OPTIONS),
        lambda: trace_of(ledger, decode=str, **OPTIONS),
    ):
        with pytest.raises(ImagesNotSupportedError, match=rf"{ledger.uuid} has 2 images.*sampled 1 more.*{PAD}"):
            export()
    [again] = samples_in(table_of([found]))
    assert (again.token_ids.tolist().count(PAD), again.media_ids) == (7, (PAD,))
    for ids in (again.media_ids, ()):  # the images themselves tell their placeholder
        with pytest.raises(SampledPlaceholderError, match="sampled 1 more"):
            fields_of(replace(again, media_ids=ids), decode=str, processor=ImageProcessor([4, 2]), **OPTIONS)
    [plain] = samples_of(two_images())
    assert fields_of(replace(plain, media_ids=()), decode=str, processor=ImageProcessor([4, 2]), **OPTIONS)


def branched() -> Ledger:
    """A rollout with images, and a branch without any whose last token is a sampled placeholder."""
    ledger = two_images()
    columns = Columns.pack(np.array([9], np.int32), np.zeros(1, np.uint8), np.array([200, PAD]), -np.ones(2))
    branch = Branch(next(iter(Reason)), 1, 0)
    draft = replace(make_draft(None, 0, [9], [1] * 2), columns=columns, engine=engine_record(2), stop=None)
    ledger.commit(replace(draft, branch=branch))
    return ledger


@pytest.mark.parametrize("ledger", [seen(([1], [], 3), stray=0), branched()], ids=["text", "branch"])
def test_a_sampled_placeholder_is_refused_without_images_too(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers pack trajectories: a neighbour's image would take its place."""
    found = samples_of(ledger)[-1]
    assert (found.images, found.token_ids[-1]) == ((), PAD)
    traces_of(monkeypatch)
    for export in (
        lambda: prompt_response_of(found, trainer="verl", takes_images=True, **OPTIONS),
        lambda: fields_of(found, decode=str, **OPTIONS),
        lambda: trace_of(ledger, decode=str, **OPTIONS),
    ):
        with pytest.raises(SampledPlaceholderError, match=rf"{ledger.uuid} has 0 images.*sampled 1 more.*{PAD}"):
            export()
    takes_none = prompt_response_of(found, trainer="TRL", **OPTIONS)
    assert takes_none.response_ids[-1] == PAD


@pytest.mark.parametrize("listed", [None, 5, "150", {"150": 1}, ["150", None, True, -1, 2**31, 150.0]])
def test_a_header_may_hold_any_json(listed: Any) -> None:
    assert media_ids_of(Ledger(certificate={"media_ids": listed})) == ()
    assert media_ids_of(Ledger(certificate={"media_ids": [7, *listed] if isinstance(listed, list) else [7]})) == (7,)


def test_a_cut_off_placeholder_is_no_problem() -> None:
    [found] = samples_of(two_images(stray=1))
    size = found.response_length - 1
    parts = prompt_response_of(found, trainer="verl", max_response_length=size, takes_images=True, **OPTIONS)
    assert (parts.prompt_ids + parts.response_ids).count(PAD) == 6


@pytest.mark.parametrize("to", ["verl", "slime"])
def test_a_file_without_place_for_images_names_what_has_one(to: str, tmp_path: Path) -> None:
    options = ExportOptions(lambda _: str, logprobs="as-recorded")
    with pytest.raises(ImagesNotSupportedError, match=rf"a JSON line of {to} has no place.*--to parquet"):
        write([TWO], to, tmp_path / "out", options)
    assert write([TWO], "parquet", tmp_path / "out", options).rows == 1


def test_a_batch_takes_a_sample_whose_images_were_taken_out() -> None:
    assert padded([replace(sample(), images=())], pad_id=0).input_ids.shape == (1, len(sample()))


@dataclass
class ImageProcessor:
    """Makes the given numbers of tokens per image."""

    tokens: list[int]
    merge_size: int = 2

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, Any]:
        assert return_tensors == "pt"
        assert [(image.mode, image.size) for image in images] == [("RGB", (64, 64))] * len(images)
        grid = np.array([[1, self.merge_size, self.merge_size * count] for count in self.tokens])
        return {"pixel_values": np.zeros((int(grid.prod(axis=1).sum()), 3)), "image_grid_thw": grid}


def test_slime_gets_pictures_and_the_processors_tensors() -> None:
    processor = SimpleNamespace(image_processor=ImageProcessor([4, 2]))
    found = fields_of(sample(), decode=str, processor=processor, **OPTIONS)
    assert set(found) <= set(CONTRACT["fields"])
    assert [each.size for each in found["multimodal_inputs"]["images"]] == [(64, 64)] * 2
    assert found["multimodal_train_inputs"]["image_grid_thw"].tolist() == [[1, 2, 8], [1, 2, 4]]
    assert found["multimodal_train_inputs"]["pixel_values"].shape == (24, 3)
    assert found["tokens"].count(PAD) == 6


def test_another_number_of_tokens_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ImageGridError, match=r"\[4, 3\].*\[4, 2\].*preprocessor_config"):
        processed(sample().images, ImageProcessor([4, 3]))
    with pytest.raises(ImageGridError):
        fields_of(sample(), decode=str, processor=ImageProcessor([4]), **OPTIONS)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=4), st.data())
def test_a_grid_has_a_token_for_each_merged_square(grid: list[tuple[int, int, int]], data: Any) -> None:
    merge = data.draw(st.integers(1, 3))
    rows = np.array([[t, h * merge, w * merge] for t, h, w in grid])
    images = [SampleImage(0, t * h * w, Image(b"", "png", 1, 1)) for t, h, w in grid]
    check_grid(images, rows, merge)
    wrong = data.draw(st.integers(0, len(images) - 1))
    images[wrong] = replace(images[wrong], length=images[wrong].length + 1)
    with pytest.raises(ImageGridError):
        check_grid(images, rows, merge)


@pytest.mark.parametrize(
    ("most", "length", "images"), [(None, 9, 2), (9, 9, 2), (5, 5, 2), (4, 3, 1), (3, 3, 1), (1, 1, 1)]
)
def test_a_response_is_never_cut_inside_an_image(most: int | None, length: int, images: int) -> None:
    """The prompt has 6 tokens; the second image is at 3 and 4 of the response."""
    parts = prompt_response_of(sample(), trainer="verl", max_response_length=most, takes_images=True, **OPTIONS)
    assert (len(parts.response_ids), len(parts.images)) == (length, images)
    assert parts.prompt_ids.count(PAD) + parts.response_ids.count(PAD) == sum(each.length for each in parts.images)


@given(st.integers(1, 15), st.integers(1, 15))
def test_prompt_and_response_hold_whole_images_with_their_pictures(prompt: int, response: int) -> None:
    options = {"max_prompt_length": prompt, "max_response_length": response, **OPTIONS}
    try:
        parts = prompt_response_of(sample(), trainer="verl", takes_images=True, **options)
    except ImagesNotSupportedError:
        assert response < 4  # tokens of the larger image
        return
    assert parts.response_ids
    for ids in (parts.prompt_ids, parts.response_ids):
        assert ids.count(PAD) in (0, 2, 4, 6)
    assert parts.prompt_ids.count(PAD) + parts.response_ids.count(PAD) == sum(each.length for each in parts.images)


def test_a_trajectory_without_images_unsets_the_tensors_of_the_last_run() -> None:
    plain = replace(sample(), images=(), token_ids=np.arange(1, 1 + len(sample()), dtype=np.int32))
    found = fields_of(plain, decode=str, processor=ImageProcessor([]), **OPTIONS)
    assert found["multimodal_train_inputs"] is None


def test_verl_gets_pictures_and_its_own_processor_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = SimpleNamespace(AgentLoopOutput=SimpleNamespace, AgentLoopMetrics=SimpleNamespace)
    monkeypatch.setattr("strands_tito.export.verl.import_optional", lambda *_: loops)
    output = output_of(TWO, end_id=2, processor=ImageProcessor([4, 2]), **OPTIONS)
    assert [each.size for each in output.multi_modal_data["images"]] == [(64, 64)] * 2
    assert (output.prompt_ids + output.response_ids).count(PAD) == 6
    with pytest.raises(ImageGridError):
        output_of(TWO, end_id=2, processor=ImageProcessor([4, 4]), **OPTIONS)
    plain = seen(([1, 2], [], 2))
    assert output_of(plain, end_id=2, **OPTIONS).multi_modal_data is None


def test_verifiers_gets_data_urls_between_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    node = traces_of(monkeypatch)
    found: Any = trace_of(TWO, decode=lambda ids: " ".join(map(str, ids)), **OPTIONS)
    first, second = found["nodes"][0], found["nodes"][2]
    urls = [f"data:image/png;base64,{base64.b64encode(picture(n)).decode()}" for n in range(2)]
    for shown, texts, url in ((first, ("1", "2"), urls[0]), (second, ("3", "4"), urls[1])):
        before, image, after = shown["message"]["content"]
        assert (before, after) == tuple({"type": "text", "text": text} for text in texts)
        assert image == {"type": "image_url", "image_url": {"url": url}}
    assert first["token_ids"] == [1, PAD, PAD, PAD, PAD, 2]
    assert found["mm_token_type_id_map"] == {PAD: 1}
    node.model_fields = {"multi_modal_data": None}
    with pytest.raises(ImagesNotSupportedError, match="verifiers before 0"):
        trace_of(TWO, decode=str, **OPTIONS)


def test_parquet_holds_the_files() -> None:
    table = table_of([sample(), samples_of(seen(([1, 2], [], 2)))[0]])
    assert table.schema.equals(schema())
    again, plain = samples_in(table)
    assert plain.images == ()
    for one, other in zip(sample().images, again.images, strict=True):
        assert (one.offset, one.length) == (other.offset, other.length)
        assert (one.image.data, one.image.sha256, one.image.format) == (
            other.image.data, other.image.sha256, other.image.format
        )  # fmt: skip
        assert (one.image.width, one.image.height) == (other.image.width, other.image.height)


def test_a_file_of_an_older_schema_has_no_images() -> None:
    older = table_of(samples_of(seen(([1, 2], [], 2)))).drop_columns(["images", "media_ids"])
    [again] = samples_in(older)
    assert again.images == ()
