"""The Python files of one vLLM release, read and never imported.

A reference names one thing in them::

    vllm.v1.engine.async_llm:AsyncLLM.sleep(level, mode)   a method that takes these parameters
    vllm.config:VllmConfig.lora_config                     an attribute
    vllm.lora.request:LoRARequest                          a class, a function, a name
    POST /pause(mode)                                      a route of the server, and a parameter
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

_REFERENCE = re.compile(
    r"(?:(?P<module>[\w.]+):(?P<name>[\w.]+)|(?P<route>[A-Z]+ /[\w/]*))"
    r"(?:\((?P<parameters>[\w, ]*)\))?"
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """
    Args:
        read: the text of a file, by its path below the folder of packages; None if there is none.
        paths: of all files.
    """

    def __init__(self, read: Callable[[str], str | None], paths: list[str]) -> None:
        self._read = read
        self._paths = paths
        self._module = cache(self._parsed)

    @classmethod
    def of_wheel(cls, path: Path) -> Sources:
        archive = zipfile.ZipFile(path)
        paths = [name for name in archive.namelist() if name.endswith(".py")]
        there = set(paths)
        return cls(lambda p: archive.read(p).decode() if p in there else None, paths)

    @classmethod
    def of_folder(cls, folder: Path, package: str = "vllm") -> Sources:
        """
        Args:
            folder: which holds the package's folder.
            package: its name.
        """

        def read(path: str) -> str | None:
            file = folder / path
            return file.read_text() if file.is_file() else None

        found = (folder / package).rglob("*.py")
        return cls(read, [str(path.relative_to(folder)) for path in found])

    def lacks(self, reference: str) -> str | None:
        """What is not there of a reference; None if all of it is."""
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise ValueError(f"no reference: {reference!r}")
        asked = {word.strip() for word in (match["parameters"] or "").split(",")} - {""}
        if match["route"]:
            found = self._route(*match["route"].split(" "))
        else:
            found = self._find(match["module"], match["name"].split("."))
        if found is None:
            return reference.partition("(")[0]
        missing = sorted(asked - _parameters(found))
        return f"{reference.partition('(')[0]}({', '.join(missing)})" if missing else None

    def abstract_methods(self, module: str, kind: str) -> set[str]:
        """Names of what a class wants its heirs to have."""
        found = self._find(module, [kind])
        body = found.body if isinstance(found, ast.ClassDef) else []
        return {
            node.name
            for node in body
            if isinstance(node, _FUNCTIONS)
            and any("abstractmethod" in ast.unparse(each) for each in node.decorator_list)
        }

    def methods(self, module: str, kind: str) -> set[str]:
        """Names of what a class has itself."""
        found = self._find(module, [kind])
        body = found.body if isinstance(found, ast.ClassDef) else []
        return {node.name for node in body if isinstance(node, _FUNCTIONS)}

    # ---------------------------------------------------------------- inside

    def _parsed(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        for name in (f"{path}.py", f"{path}/__init__.py"):
            text = self._read(name)
            if text is not None:
                return ast.parse(text)
        return None

    def _find(self, module: str, names: list[str]) -> ast.AST | None:
        tree = self._module(module)
        if tree is None:
            return None
        first, *rest = names
        found = _named(tree.body, first)
        if isinstance(found, (ast.Import, ast.ImportFrom)):
            return self._imported(module, found, first, rest)
        if found is None or not rest:
            return found
        if not isinstance(found, ast.ClassDef):
            return None
        return self._member(module, found, rest[0])

    def _imported(
        self, module: str, statement: ast.stmt, name: str, rest: list[str]
    ) -> ast.AST | None:
        """What an import brings; the import itself where that is not in these sources."""
        if not isinstance(statement, ast.ImportFrom):
            return None if rest else statement
        origin = next(a.name for a in statement.names if (a.asname or a.name) == name)
        source = statement.module or ""
        if statement.level:
            package = module.split(".")
            if not self._is_package(module):
                package = package[:-1]
            package = package[: len(package) - statement.level + 1]
            source = ".".join([*package, source]).strip(".")
        there = self._module(source) is not None
        return self._find(source, [origin, *rest]) if there or rest else statement

    def _is_package(self, module: str) -> bool:
        return self._read(f"{module.replace('.', '/')}/__init__.py") is not None

    def _member(self, module: str, kind: ast.ClassDef, name: str) -> ast.AST | None:
        found = _named(kind.body, name) or _assigned_to_self(kind, name)
        if found is not None:
            return found
        for base in kind.bases:
            named = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(named, ast.Name):
                found = self._find(module, [named.id, name])
                if found is not None:
                    return found
        return None

    def _route(self, verb: str, path: str) -> ast.AST | None:
        for file in self._paths:
            if not file.startswith("vllm/entrypoints/"):
                continue
            text = self._read(file) or ""
            if f'"{path}"' not in text:
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, _FUNCTIONS) and _serves(node, verb, path):
                    return node
        return None


def _named(body: list[ast.stmt], name: str) -> ast.AST | None:
    """What a block calls ``name``; branches of conditions count."""
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, (ast.Import, ast.ImportFrom)) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            return node
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
            return node
        if isinstance(node, (ast.If, ast.Try)):
            found = _named([*node.body, *node.orelse], name)
            if found is not None:
                return found
    return None


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _assigned_to_self(kind: ast.ClassDef, name: str) -> ast.AST | None:
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and node.attr == name
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            return node
    return None


def _parameters(node: ast.AST) -> set[str]:
    """Names under which a function takes arguments; of a class those that its fields have."""
    if isinstance(node, ast.ClassDef):
        made = _named(node.body, "__init__")
        if made is not None:
            return _parameters(made)
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        return set().union(*map(_targets, fields)) if fields else set()
    if not isinstance(node, _FUNCTIONS):
        return set()
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in named} | _query(node)


def _query(node: _Function) -> set[str]:
    """What a route reads from its request by name."""
    return {
        call.args[0].value
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("get", "getlist")
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and isinstance(call.args[0].value, str)
    }


def _serves(node: _Function, verb: str, path: str) -> bool:
    for decorator in node.decorator_list:
        if (
            isinstance(decorator, ast.Call)
            and isinstance(decorator.func, ast.Attribute)
            and decorator.func.attr == verb.lower()
            and decorator.args
            and isinstance(decorator.args[0], ast.Constant)
            and decorator.args[0].value == path
        ):
            return True
    return False
