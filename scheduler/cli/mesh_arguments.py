"""Parsers of meshes and partition specs on the command line."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Annotated

import typer

# For each axis of an array in the spec, the mesh axes that shard it.
Spec = tuple[tuple[str, ...], ...]

MeshName = Annotated[str | None, typer.Option("--mesh", help="A mesh: its axes and their extents, data=2,model=4.")]


def mesh_of(text: str) -> dict[str, int]:
    """Parses a mesh such as ``data=2,model=4``.

    Raises:
      ValueError: the text is not a mesh.
    """
    found: dict[str, int] = {}
    for each in text.split(","):
        name, _, extent = (part.strip() for part in each.partition("="))
        if not name.isidentifier() or not extent.isdecimal() or not int(extent):
            raise ValueError(f"expected a mesh such as data=2,model=4, found {text!r}")
        if name in found:
            raise ValueError(f"the mesh {text!r} has the axis {name} twice")
        found[name] = int(extent)
    return found


def letters_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses texts such as ``m=data`` or ``m=data,model`` to the mesh axes that shard each letter.

    Raises:
      ValueError: a text is malformed, or repeats a letter.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        letter, _, axes = (part.strip() for part in text.partition("="))
        names = tuple(name.strip() for name in axes.split(","))
        if not letter or not all(names):
            raise ValueError(f"expected a letter and its mesh axes, as in m=data,model, found {text!r}")
        if letter in found:
            raise ValueError(f"{letter} is sharded twice")
        found[letter] = names
    return found


def specs_of(text: str) -> list[Spec]:
    """Parses partition specs such as ``P('data', None), P(None, ('x', 'y'))``; quotes around names are optional.

    Raises:
      ValueError: the text is not a list of partition specs.
    """
    try:
        (statement,) = ast.parse(f"[{text}]").body
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.List)
        return [_spec(each) for each in statement.value.elts]
    except (SyntaxError, AssertionError, ValueError):
        raise ValueError(
            f"expected a partition spec per array, as in P('data', None), P(None, 'model'), found {text!r}"
        ) from None


def _spec(node: ast.expr) -> Spec:
    if not isinstance(node, ast.Call) or node.keywords or ast.unparse(node.func).split(".")[-1] not in _CALLED:
        raise ValueError
    return tuple(
        tuple(map(_name, each.elts)) if isinstance(each, ast.Tuple) else () if _is_none(each) else (_name(each),)
        for each in node.args
    )


_CALLED = ("P", "PartitionSpec")


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return name
        case _:
            raise ValueError


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
