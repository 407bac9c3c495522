"""What our own sources take from SGLang: imports, calls and flags.

Read from the import statements and the uses of what they bind, so that no name is written a second
time for the table in `sglang_names.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dflash_sglang.preflight.source import FLAGS, Name, parameters

PACKAGE = Path(__file__).parents[1]


def imported_names(*, with_cpu: bool) -> list[Name]:
    """What the modules of this package import from SGLang, and what they do with it.

    An import stands for the name itself. A class or module that is imported stands also for the
    attributes that are read from it, and a call for the keywords that it passes. Attributes of
    objects and the order of positional arguments cannot be seen here: `sglang_names.py` has them.

    Args:
        with_cpu: with the modules of `cpu/`, which SGLang loads only where that platform serves.
    """
    found: dict[str, Name] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE)
        if where.parts[0] == "cpu" and not with_cpu:
            continue
        for path, keywords in _uses(str(where)):
            earlier = found.get(path, Name(path, str(where)))
            found[path] = earlier._replace(keywords=earlier.keywords.union(keywords))
    return list(found.values())


def parameters_of(ours: str, member: str) -> tuple[str, ...]:
    """Parameters of a function of ours, "**" last where it takes any keyword.

    Args:
        ours: name of our class that has it as a method, or "folder/" below this package, for a
            function in one of the folder's modules.
        member: its name.

    Raises:
        LookupError: there is no such function.
    """
    folder = ours.endswith("/")
    for file in sorted((PACKAGE / ours if folder else PACKAGE).rglob("*.py")):
        tree: ast.AST | None = parsed(str(file.relative_to(PACKAGE)))
        owner = tree if folder else _definition(tree, ours)
        params = None if owner is None else parameters(_definition(owner, member))
        if params is not None:
            return params
    raise LookupError(f"{ours} of dflash_sglang has no function {member}")


def _definition(owner: ast.AST | None, name: str) -> ast.AST | None:
    body: list[ast.stmt] = getattr(owner, "body", [])
    kinds = ast.FunctionDef | ast.ClassDef
    return next((node for node in body if isinstance(node, kinds) and node.name == name), None)


@cache
def parsed(where: str) -> ast.Module:
    """Syntax tree of one of our modules, given by its file below this package."""
    return ast.parse((PACKAGE / where).read_text(encoding="utf-8"))


@cache
def _uses(where: str) -> list[tuple[str, list[str]]]:
    """Paths that a module of ours uses, each with the keywords of a call."""
    return list(_find_uses(parsed(where)))


def _find_uses(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}:{alias.name}"
                yield f"{node.module}:{alias.name}", []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "flags":  # by convention a view of SGLang's server flags
                yield f"{FLAGS}:{node.attr}", []
            elif node.value.id in bound:
                yield f"{bound[node.value.id]}.{node.attr}", []
        elif isinstance(node, ast.Call) and (path := _called(node.func, bound)):
            yield path, [keyword.arg for keyword in node.keywords if keyword.arg]


def _called(function: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(function, ast.Name):
        return bound.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        owner = bound.get(function.value.id)
        return None if owner is None else f"{owner}.{function.attr}"
    return None
