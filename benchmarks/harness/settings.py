"""The settings of a subject, read off its source: they cannot differ from what runs."""

from __future__ import annotations

import ast
import copy
import importlib
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

# Libraries whose calls are no settings of a subject.
NO_SETTINGS = ("msgspec", "numpy", "typing")
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# What a function's caller gave for its parameters, as source: classes and functions of libraries, handed on by name.
Bound = tuple[tuple[str, str], ...]


def options_of(module: Any) -> dict[str, Any]:
    """A subject's settings: its constants, and all its calls into libraries as its source has them, with all their arguments, those of the
    subjects it builds on included. A class that a function is given is written as what it is."""
    tree = parsed(module)
    names = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name)
    }
    found = {
        name.lower().lstrip("_"): value
        for name, value in vars(module).items()
        if name in names and name.isupper() and isinstance(value, int | float | str) and name not in ("TITLE", "FORMAT")
    }
    walk = Walk()
    walk.module(module.__name__)
    return found | {"calls": list(walk.calls)}


@dataclass(slots=True)
class Names:
    """What names of a module are: subjects' modules, parts of these, or of libraries (neither standard nor the harness's)."""

    subjects: dict[str, str] = field(default_factory=dict)
    parts: dict[str, tuple[str, str]] = field(default_factory=dict)
    libraries: set[str] = field(default_factory=set)
    # Attributes of ``self`` that hold what a library gave.
    attributes: set[str] = field(default_factory=set)


@cache
def names_of(tree: ast.Module) -> Names:
    """All imports of a module, in functions too, and names and attributes that hold what came out of a library. Parameters of type ``Any``,
    or of none, count as a library's, and classes made of a library's."""
    found = Names()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            typed = {one.arg: ast.unparse(one.annotation) if one.annotation else "Any" for one in node.args.args}
            found.libraries |= {name for name, kind in typed.items() if kind == "Any" and name != "self"}
            found.libraries |= {one.name for one in node.body if isinstance(one, ast.ClassDef) and one.bases}
        if isinstance(node, ast.Import | ast.ImportFrom):
            _imported(node, found)
    # Twice, since a name may be assigned from one that is assigned further below.
    for _ in range(2):
        for node in ast.walk(tree):
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            value = node.context_expr if isinstance(node, ast.withitem) else value
            if value is not None and isinstance(value, ast.Call) and of_library(value.func, found):
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                targets = [node.optional_vars] if isinstance(node, ast.withitem) else targets
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.libraries.add(target.id)
                    elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                        found.attributes.add(target.attr)
    return found


def _imported(node: ast.Import | ast.ImportFrom, found: Names) -> None:
    source = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        name = alias.asname or alias.name.partition(".")[0]
        if source == "benchmarks.subjects" or (source == "benchmarks.harness" and alias.name == "multimodal"):
            found.subjects[name] = f"{source}.{alias.name}"
        elif source.startswith("benchmarks.subjects."):
            found.parts[name] = source, alias.name
        elif (source or alias.name).partition(".")[0] not in {"benchmarks", *sys.stdlib_module_names, *NO_SETTINGS}:
            found.libraries.add(name)


def of_library(function: ast.expr, names: Names) -> bool:
    """Whether what is called begins with something of a library: ``a`` of ``a.b(...).c``, or ``self.a``."""
    while isinstance(function, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(function, ast.Attribute):
            if isinstance(function.value, ast.Name) and function.value.id == "self" and function.attr in names.attributes:
                return True
            function = function.value
        else:
            function = function.func if isinstance(function, ast.Call) else function.value
    return isinstance(function, ast.Name) and function.id in names.libraries


class Walk:
    """Goes through a subject and what it uses of others, and collects calls."""

    def __init__(self) -> None:
        self.calls: dict[str, None] = {}
        self.seen: set[tuple[str, str, Bound]] = set()

    def module(self, name: str) -> None:
        """All of a module. What its functions are given is found where they are called; those not called within are looked at as they are."""
        tree = parsed(importlib.import_module(name))
        functions = [node.name for node in tree.body if isinstance(node, Function)]
        for node in tree.body:
            if not isinstance(node, Function):
                self._node(name, tree, node, ())
        for one in functions:
            if not self._called_within(tree, one):
                self.function(name, one, ())
        for one in functions:
            if not any(seen[:2] == (name, one) for seen in self.seen):
                self.function(name, one, ())

    def _called_within(self, tree: ast.Module, name: str) -> bool:
        return any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name for node in ast.walk(tree)
        )

    def function(self, module: str, name: str, bound: Bound) -> None:
        """One function, class or constant of a module, with what its caller gave."""
        if (module, name, bound) in self.seen:
            return
        self.seen.add((module, name, bound))
        tree = parsed(importlib.import_module(module))
        for node in tree.body:
            if name in defined(node):
                self._node(module, tree, node, bound)
        names = names_of(tree)
        # A name that a module has from another one.
        if name in names.parts:
            self.function(*names.parts[name], bound)

    def _node(self, module: str, tree: ast.Module, node: ast.AST, bound: Bound) -> None:
        names = names_of(tree)
        if isinstance(node, ast.Call):
            target = self._target(module, tree, node.func, names)
            if target is not None:
                self.function(*target, self._given(target, node, names, dict(bound)))
                if hands_on(target):
                    self.calls[ast.unparse(node)] = None
                for child in [*node.args, *node.keywords]:
                    self._node(module, tree, child, bound)
                return
            if of_library(node.func, names):
                self.calls[ast.unparse(Rename(dict(bound)).visit(copy.deepcopy(node)))] = None
                self._within(module, tree, node, bound)
                return
        elif isinstance(node, ast.Attribute | ast.Name):
            target = self._target(module, tree, node, names)
            if target is not None:
                self.function(*target, ())
        for child in ast.iter_child_nodes(node):
            self._node(module, tree, child, bound)

    def _within(self, module: str, tree: ast.Module, node: ast.AST, bound: Bound) -> None:
        """What a recorded call holds is in its text already; what it uses of subjects is followed."""
        names = names_of(tree)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                target = self._target(module, tree, inner.func, names)
                if target is not None:
                    self.function(*target, self._given(target, inner, names, dict(bound)))
            elif isinstance(inner, ast.Attribute | ast.Name):
                target = self._target(module, tree, inner, names)
                if target is not None:
                    self.function(*target, ())

    def _target(self, module: str, tree: ast.Module, node: ast.expr, names: Names) -> tuple[str, str] | None:
        """The subject's function or class that an expression names."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names.subjects:
            return names.subjects[node.value.id], node.attr
        if isinstance(node, ast.Name):
            if node.id in names.parts:
                return names.parts[node.id]
            if node.id not in names.libraries and any(node.id in defined(one) for one in tree.body):
                return module, node.id
        return None

    def _given(self, target: tuple[str, str], call: ast.Call, names: Names, bound: dict[str, str]) -> Bound:
        """Classes and functions of libraries among the arguments of a call, by the parameters of what is called."""
        tree = parsed(importlib.import_module(target[0]))
        found = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == target[1]), None)
        if found is None:
            return ()
        parameters = [one.arg for one in found.args.args]
        given = dict(zip(parameters, call.args, strict=False)) | {one.arg: one.value for one in call.keywords if one.arg}
        told = {}
        for name, value in given.items():
            if isinstance(value, ast.Name) and value.id in bound:
                told[name] = bound[value.id]
            elif isinstance(value, ast.Name | ast.Attribute) and of_library(value, names):
                text = ast.unparse(value)
                # Classes, and functions of a module: what only holds a library's object keeps its name.
                if text.rpartition(".")[2][:1].isupper():
                    told[name] = text
        return tuple(sorted(told.items()))


def hands_on(target: tuple[str, str]) -> bool:
    """Whether a function hands arguments on that only its callers name (``**more``)."""
    nodes = parsed(importlib.import_module(target[0])).body
    return any(isinstance(node, ast.FunctionDef) and node.name == target[1] and node.args.kwarg is not None for node in nodes)


class Rename(ast.NodeTransformer):
    """Writes parameters as what they were given."""

    def __init__(self, bound: dict[str, str]) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """One name."""
        return ast.parse(self.bound[node.id], mode="eval").body if node.id in self.bound else node


@cache
def parsed(module: Any) -> ast.Module:
    """A module's source."""
    return ast.parse(Path(module.__file__).read_text())


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement at a module's top defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]
