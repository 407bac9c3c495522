"""Look names up in the source of an SGLang, without importing it.

Modules are located and parsed, so the installed release and one that was only unpacked are read
alike, and a look-up costs no torch import.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from dflash_sglang.errors import ContractError

FLAGS = "sglang.srt.arg_groups.fields"  # the modules whose classes declare SGLang's server flags


class Name(NamedTuple):
    """One name of SGLang's that we rely on."""

    path: str  # "package.module:Class.attribute", "package.module:function" or FLAGS + ":flag"
    why: str  # what we use it for
    # Leading parameters, without self or cls; with "**" last, others may stand between them.
    params: tuple[str, ...] = ()
    keywords: frozenset[str] = frozenset()  # parameters that we pass by name


class Mismatch(NamedTuple):
    """A name that an SGLang does not offer as listed."""

    name: Name
    found: str

    def __str__(self) -> str:
        expected = f"({', '.join(self.name.params)}, ...)" if self.name.params else ""
        return f"{self.name.path}{expected}: {self.found}; needed for {self.name.why}"


class _NotFoundError(Exception):
    """A name or module that is not there; the message names which."""


class Source:
    """The source tree of one SGLang release."""

    def __init__(self, folder: Path) -> None:
        """Read the release unpacked in a folder.

        Args:
            folder: holds `sglang/`, as an unpacked wheel does.

        Raises:
            ContractError: it does not.
        """
        if not (folder / "sglang" / "__init__.py").is_file():
            raise ContractError(
                f"{folder} holds no sglang/__init__.py. Give the folder into which a wheel of "
                "sglang was unpacked."
            )
        self._folder = folder
        self._tree = cache(self._parse)

    @staticmethod
    def installed() -> Source | None:
        """The release that `import sglang` would find, None without one."""
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return None
        return Source(Path(next(iter(spec.submodule_search_locations))).parent)

    def mismatches(self, names: list[Name]) -> list[Mismatch]:
        """The names that this release does not offer as listed, in the order given."""
        found = ((name, self.problem(name)) for name in names)
        return [Mismatch(name, problem) for name, problem in found if problem is not None]

    def problem(self, name: Name) -> str | None:
        """What is wrong with a name, None when it is there as listed.

        Parameters that SGLang adds at the end do not break us, renamed or reordered ones do.
        """
        module, _, qualname = name.path.partition(":")
        try:
            if module == FLAGS:
                return None if qualname in self._flags else "not a server flag"
            node = self._resolve(module, qualname.split(".") if qualname else [])
        except _NotFoundError as missing:
            return str(missing)
        if node is None or not (name.params or name.keywords):
            return None
        params = self._params(*node)
        if params is None:
            return "not a function or a class with a constructor of its own"
        fits = _in_order(name.params, params) and ("**" in params or name.keywords.issubset(params))
        return None if fits else f"has parameters ({', '.join(params)})"

    def _parse(self, module: str) -> ast.Module | None:
        base = self._folder.joinpath(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    @cached_property
    def _flags(self) -> set[str]:
        files = self._folder.joinpath(*FLAGS.split(".")).glob("*.py")
        trees = [self._tree(f"{FLAGS}.{file.stem}") for file in files]
        classes = [n for tree in trees for n in _members(tree) if isinstance(n, ast.ClassDef)]
        return {field for node in classes for field in _annotated(node)}

    def _resolve(self, module: str, parts: list[str]) -> tuple[str, ast.AST] | None:
        """Module and definition of a name; None where it is a value that source does not show.

        Raises:
            _NotFoundError: there is no such name.
        """
        tree = self._tree(module)
        if tree is None:
            raise _NotFoundError("module not found")
        if not parts:
            return module, tree
        node = _binding(tree, parts[0])
        if node is None:
            if self._tree(f"{module}.{parts[0]}") is not None:
                return self._resolve(f"{module}.{parts[0]}", parts[1:])
            for child in _members(tree):
                if isinstance(child, ast.ImportFrom) and child.names[0].name == "*":
                    try:
                        return self._resolve(self._imported(module, child), parts)
                    except _NotFoundError:
                        continue
            raise _NotFoundError("name not found")
        if isinstance(node, ast.ImportFrom):
            origin = self._imported(module, node)
            if not origin.startswith("sglang"):
                return None
            own = next(a.name for a in node.names if (a.asname or a.name) == parts[0])
            return self._resolve(origin, [own, *parts[1:]])
        return self._member(module, node, parts[1:])

    def _member(self, module: str, node: ast.AST, parts: list[str]) -> tuple[str, ast.AST] | None:
        if not parts:
            return module, node
        if not isinstance(node, ast.ClassDef):
            return None  # an attribute of an object
        for origin, owner in self._ancestry(module, node):
            found = _binding(owner, parts[0]) or _self_attribute(owner, parts[0])
            if found is not None:
                return self._member(origin, found, parts[1:])
        raise _NotFoundError("name not found")

    def _ancestry(self, module: str, node: ast.ClassDef) -> Iterator[tuple[str, ast.ClassDef]]:
        """A class and its bases, as far as they are SGLang's."""
        yield module, node
        for base in node.bases:
            if not isinstance(base, ast.Name):
                continue
            try:
                found = self._resolve(module, [base.id])
            except _NotFoundError:  # a builtin
                continue
            if found is not None and isinstance(found[1], ast.ClassDef):
                yield from self._ancestry(found[0], found[1])

    def _imported(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module that an import statement reads."""
        if not node.level:
            return node.module or ""
        base = self._folder.joinpath(*module.split("."))
        package = module.split(".") if base.is_dir() else module.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _params(self, module: str, node: ast.AST) -> tuple[str, ...] | None:
        if isinstance(node, ast.ClassDef):
            owners = [owner for _, owner in self._ancestry(module, node)]
            for owner in owners:
                if init := _binding(owner, "__init__"):
                    return parameters(init)
                if any("dataclass" in ast.unparse(mark) for mark in owner.decorator_list):
                    break
            # A dataclass, a named tuple or a struct.
            return tuple(f for owner in reversed(owners) for f in _annotated(owner)) or None
        return parameters(node)


def parameters(node: ast.AST | None) -> tuple[str, ...] | None:
    """Parameters of a function without self or cls, "**" last where it takes any keyword.

    Returns:
        None for anything but a function.
    """
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    arguments = node.args
    names = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    return (*names, "**") if arguments.kwarg else tuple(names)


def _in_order(wanted: tuple[str, ...], params: tuple[str, ...]) -> bool:
    if wanted[-1:] != ("**",):
        return params[: len(wanted)] == wanted
    rest = iter(params)
    return all(param in rest for param in wanted[:-1])


def _members(node: ast.AST | None) -> Iterator[ast.stmt]:
    """Statements that bind names in a module or class body, through `if` and `try` blocks."""
    for child in getattr(node, "body", ()):
        yield child
        if isinstance(child, ast.If | ast.Try):
            yield from _members(child)
            yield from child.orelse


def _binding(node: ast.AST, name: str) -> ast.stmt | None:
    """The last statement that binds a name: the one that holds at run time."""
    found = None
    for child in _members(node):
        if _binds(child, name):
            found = child
    return found


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


def _self_attribute(owner: ast.ClassDef, name: str) -> ast.stmt | None:
    """Where a method of the class assigns `self.name`."""
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in (node.target,) if isinstance(node, ast.AnnAssign) else targets:
            if isinstance(target, ast.Attribute) and target.attr == name:
                return node if isinstance(node, ast.stmt) else None
    return None


def _annotated(owner: ast.ClassDef) -> list[str]:
    """Names that a class body annotates."""
    nodes = (node.target for node in owner.body if isinstance(node, ast.AnnAssign))
    return [target.id for target in nodes if isinstance(target, ast.Name)]
