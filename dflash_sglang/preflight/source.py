"""Look a name up in the source of the installed SGLang, without importing it.

Modules are located and parsed, so a look-up costs no torch import and can run in every SGLang
process (plugins load in all of them) and in ``python -m dflash_sglang.check``.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
    """One name of SGLang's that we rely on."""

    path: str  # "package.module:Class.attribute" or "package.module:function"
    params: (
        tuple[str, ...] | None
    )  # leading parameters without self/cls; None: only the name matters
    why: str  # what we use it for


class Mismatch(NamedTuple):
    """A name that the installed SGLang does not offer as listed."""

    name: Name
    found: str

    def __str__(self) -> str:
        expected = "" if self.name.params is None else f"({', '.join(self.name.params)}, ...)"
        return f"{self.name.path}{expected}: {self.found}; needed for {self.name.why}"


def problem(name: Name) -> str | None:
    """What is wrong with a name, None when the installed SGLang has it as listed.

    A callable matches when its leading parameters are the ones listed: parameters that SGLang adds
    at the end do not break us, renamed or reordered ones do.
    """
    module, _, qualname = name.path.partition(":")
    tree = _parsed(module)
    if tree is None:
        return "module not found"
    node = _resolve(tree, qualname.split(".")) if qualname else tree
    if node is None:
        return "name not found"
    if name.params is None:
        return None
    params = _params(node)
    if params is None:
        return "not a function or class with a constructor of its own"
    if params[: len(name.params)] != name.params:
        return f"has parameters ({', '.join(params)})"
    return None


@functools.cache
def _parsed(module: str) -> ast.Module | None:
    """Syntax tree of an SGLang module, located by path so that nothing is imported."""
    root = importlib.util.find_spec(module.partition(".")[0])
    if root is None or not root.submodule_search_locations:
        return None
    base = Path(next(iter(root.submodule_search_locations))).joinpath(*module.split(".")[1:])
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _resolve(tree: ast.AST, parts: list[str]) -> ast.AST | None:
    node: ast.AST | None = tree
    for part in parts:
        owner = node
        # The last binding wins at run time: a definition below an import for type checkers.
        bindings = [child for child in _members(owner) if _binds(child, part)]
        node = bindings[-1] if bindings else None
        if node is None and isinstance(owner, ast.ClassDef):
            node = _self_attribute(owner, part)
        if node is None:
            return None
    return node


def _self_attribute(owner: ast.ClassDef, name: str) -> ast.AST | None:
    """Where a method of the class assigns `self.name`."""
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in (node.target,) if isinstance(node, ast.AnnAssign) else targets:
            if isinstance(target, ast.Attribute) and target.attr == name:
                return node
    return None


def _members(node: ast.AST | None) -> Iterator[ast.stmt]:
    """Statements that bind names in a module or class body, through `if` and `try` blocks."""
    for child in getattr(node, "body", ()):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _members(child)
            yield from child.orelse


def _binds(node: ast.stmt, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    if isinstance(node, ast.Import | ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    return False


def _params(node: ast.AST) -> tuple[str, ...] | None:
    if isinstance(node, ast.ClassDef):
        node = _resolve(node, ["__init__"]) or node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)
