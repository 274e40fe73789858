"""An agent that looks at pictures: a tool draws shapes, and the model says what it sees. It works on every engine."""

from __future__ import annotations

import io
import random
from collections.abc import AsyncGenerator
from typing import Any, Literal, get_args

from PIL import Image, ImageDraw
from strands import Agent, tool

from strands_tito import TITOModel

Shape = Literal["circle", "square", "triangle"]
Colour = Literal["red", "green", "blue", "orange", "purple"]
Count = Literal["one", "two", "three", "four", "five", "six"]
COUNTS = get_args(Count)
QUESTIONS = [
    "Draw some circles and count them.",
    "Draw triangles. What colour are they?",
    "Draw a few squares. Is their number even?",
    "Draw any shapes and describe the picture.",
    "Draw one shape. Where is it?",
    "Draw many shapes. Are there more than four?",
]
AGAIN = "Draw another picture. How do the two differ?"
SIZE = 96
"""Sides of a picture, in pixels."""


@tool
def draw_shapes(shape: Shape, count: Count, colour: Colour) -> dict[str, Any]:
    """Draw shapes at random places, and look at the picture.

    Args:
        shape: The kind of all shapes.
        count: How many.
        colour: Their colour.
    """
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(picture)
    for _ in range(COUNTS.index(count) + 1):
        left, top, side = random.randrange(SIZE - 24), random.randrange(SIZE - 24), random.randrange(12, 24)
        box = (left, top, left + side, top + side)
        if shape == "circle":
            pen.ellipse(box, fill=colour)
        elif shape == "square":
            pen.rectangle(box, fill=colour)
        else:
            pen.polygon([(left, top + side), (left + side, top + side), (left + side // 2, top)], fill=colour)
    file = io.BytesIO()
    picture.save(file, "png")
    image = {"image": {"format": "png", "source": {"bytes": file.getvalue()}}}
    return {"status": "success", "content": [{"text": "The picture:"}, image]}


class DrawsFirst(TITOModel):
    """A model that must answer each question with a call of the tool.

    A model with random weights calls no tool by itself. The forced call's tokens are constrained and not trained; what
    it says about the picture is its own.
    """

    def stream(self, messages: Any, *arguments: Any, **options: Any) -> AsyncGenerator[Any]:
        """Stream an answer; see `TITOModel.stream`."""
        is_question = not any("toolResult" in block for block in messages[-1]["content"])
        if is_question:
            options["tool_choice"] = {"tool": {"name": "draw_shapes"}}
        return super().stream(messages, *arguments, **options)


def make_agent(model: TITOModel) -> Agent:
    """Make the agent of one rollout."""
    return Agent(model=model, tools=[draw_shapes], callback_handler=None)
