"""An agent with a calculator. It works on every engine."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from strands import Agent, tool

from strands_tito import TITOModel

QUESTIONS = [
    "What is 25 * 17?",
    "What is 148 + 389?",
    "What is 1000 - 274?",
    "What is 36 * 12?",
    "What is 945 / 15?",
    "What is 77 * 8?",
    "What is 613 + 298?",
    "What is 504 - 168?",
    "What is 19 * 23?",
    "What is 1764 / 42?",
    "What is 256 + 512?",
    "What is 31 * 31?",
]

_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def evaluate(expression: str) -> float:
    """Evaluate an expression of numbers, +, -, *, / and parentheses."""

    def value(node: ast.AST) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return _OPERATIONS[type(node.op)](value(node.operand))
        if isinstance(node, ast.BinOp):
            return _OPERATIONS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{expression!r} is not plain arithmetic.")

    return value(ast.parse(expression, mode="eval").body)


@tool
def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: The expression, such as "12 + 30".
    """
    return f"{evaluate(expression):g}"


def make_agent(model: TITOModel) -> Agent:
    """Make the agent of one rollout."""
    return Agent(model=model, tools=[calculator], callback_handler=None)
