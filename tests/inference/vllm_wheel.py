"""Holds a wheel of vLLM against the table of internals, without importing it.

    python -m tests.inference.vllm_wheel vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl

Prints what is missing, and sampling parameters that are not reviewed; the exit status is 1 if there
are any. It reads the code as far as a reader can without running it: definitions, imports and base
classes inside vLLM. It cannot find what a program computes.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.inference.vllm_hooks import HOOKS, SAMPLING_PARAMETERS


@dataclass(frozen=True, eq=False)
class Module:
    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """What it binds, also below `if` and `try`; the first binding counts."""
        return _bound_names(self.tree.body)

    def absolute(self, imported: ast.ImportFrom) -> str:
        """The module that a statement of this module imports from."""
        if not imported.level:
            return imported.module or ""
        parts = self.name.split(".")
        base = parts[: len(parts) - imported.level + self.is_package]
        return ".".join([*base, *filter(None, [imported.module])])


@dataclass(frozen=True)
class Definition:
    """A statement that binds a name, and the module in which it stands."""

    node: ast.AST
    module: Module


@dataclass
class WheelVllm:
    """The vLLM of a wheel, parsed."""

    wheel: zipfile.ZipFile
    _modules: dict[str, Module | None] = field(default_factory=dict)

    @cached_property
    def _members(self) -> set[str]:
        return {*self.wheel.namelist()}

    @property
    def version(self) -> tuple[int, int]:
        (described,) = [one for one in self._members if one.endswith(".dist-info/METADATA")]
        major, minor = described.split("-")[1].split(".")[:2]
        return int(major), int(minor)

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        path = name.replace(".", "/")
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in self._members:
                is_package = file.endswith("/__init__.py")
                return Module(name, self.wheel.read(file).decode(), is_package)
        return None

    def attribute(self, owner: Module | Definition, name: str) -> Definition | None:
        """Follows imports and aliases within vLLM; looks in base classes. An abstract method does
        not count."""
        if isinstance(owner, Module):
            node = owner.names.get(name)
            return None if node is None else self._resolved(Definition(node, owner), name)
        for cls in self._with_bases(owner):
            node = _bound_names(cls.node.body).get(name)
            if node is not None:
                return None if _is_abstract(node) else Definition(node, cls.module)
        return None

    def parameters(self, function: Definition) -> set[str]:
        """Of a class: those of its __init__, else its fields."""
        node = function.node
        if isinstance(node, ast.ClassDef):
            made = self.attribute(function, "__init__")
            if made is not None:
                return self.parameters(made)
            return {
                name
                for cls in self._with_bases(function)
                for name, bound in _bound_names(cls.node.body).items()
                if isinstance(bound, ast.AnnAssign)
            }
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return set()
        given = node.args
        return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}

    def source(self, found: Module | Definition) -> str:
        if isinstance(found, Module):
            return found.text
        return ast.get_source_segment(found.module.text, found.node) or ""

    def _resolved(self, found: Definition, name: str) -> Definition | None:
        """Where the name is defined, if it is imported, or is another name of something."""
        node, module = found.node, found.module
        if isinstance(node, ast.ImportFrom):
            origin = next(one.name for one in node.names if name in (one.asname, one.name))
            source = self.module(module.absolute(node))
            if source is None:  # outside vLLM
                return found
            binds = source is not module and self.attribute(source, origin)
            return binds or self._submodule(source, origin, node)
        # An instance that the module makes on demand has a type in the module's annotations.
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return self._named(node.annotation, module) or found
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            return self._named(node.value, module) or found
        return found

    def _submodule(self, package: Module, name: str, node: ast.AST) -> Definition | None:
        found = self.module(f"{package.name}.{name}")
        return None if found is None else Definition(node, found)

    def _named(self, expression: ast.expr, module: Module) -> Definition | None:
        """What `name`, `name[…]` or `"name"` means in the module."""
        match expression:
            case ast.Name(id=name) | ast.Constant(value=str(name)):
                return self.attribute(module, name)
            case ast.Subscript(value=generic):
                return self._named(generic, module)
        return None

    def _with_bases(self, owner: Definition) -> Iterator[Definition]:
        """The class and its base classes in vLLM, nearest first."""
        if not isinstance(owner.node, ast.ClassDef):
            return
        yield owner
        for base in owner.node.bases:
            found = self._named(base, owner.module)
            if found is not None and found.node is not owner.node:
                yield from self._with_bases(found)


def _bound_names(statements: Iterable[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in statements:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.setdefault(name, node)
            case ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.setdefault(name, node)
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
            case ast.ImportFrom(names=names):
                for one in names:
                    found.setdefault(one.asname or one.name, node)
            case ast.If() | ast.Try() | ast.With():
                further = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
                further += [one.body for one in getattr(node, "handlers", [])]
                for part in further:
                    for name, bound in _bound_names(part).items():
                        found.setdefault(name, bound)
    return found


def _is_abstract(node: ast.AST) -> bool:
    return any(
        ast.unparse(one).endswith("abstractmethod") for one in getattr(node, "decorator_list", ())
    )


def gaps(vllm: WheelVllm) -> list[str]:
    """What the table names and the wheel lacks, and sampling parameters that nobody looked at."""
    asked = [hook for hook in HOOKS if hook.since <= vllm.version]
    found = [problem for hook in asked if (problem := hook.problem(vllm)) is not None]
    sampling = vllm.module("vllm.sampling_params")
    parameters = sampling and vllm.attribute(sampling, "SamplingParams")
    unknown = (vllm.parameters(parameters) if parameters else set()) - SAMPLING_PARAMETERS
    return [
        *found,
        *(f"SamplingParams.{name} is not reviewed" for name in sorted(unknown) if name[0] != "_"),
    ]


def main(path: Path) -> int:
    with zipfile.ZipFile(path) as wheel:
        vllm = WheelVllm(wheel)
        found = gaps(vllm)
    version = ".".join(map(str, vllm.version))
    print("\n".join(found) or f"vLLM {version} has all of the table")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
