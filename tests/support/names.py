"""Names of this project in texts: which of those that pages mention do not exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import verifiable_relu

ROOT = Path(__file__).resolve().parents[2]

_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_CALL = re.compile(r"[A-Za-z_][\w.]*\(.*\)")
_PATH = re.compile(r"(?:verifiable_relu|benchmarks|tests|docs|examples|specs)/[\w/.-]*\w|[a-z_]+(?:/[a-z_]+)*/\w+\.py")
_FILES = (".py", ".md", ".csv", ".json", ".jsonl", ".onnx", ".vnnlib", ".toml", ".npz", ".txt", ".html", ".gz", ".pt")
_ALIASES = {"np": "numpy", "nn": "torch.nn", "F": "torch.nn.functional"}


@cache
def objects() -> dict[str, list[object]]:
    """Modules, by all ends of their dotted names, and the classes and functions of modules, by name."""
    found: dict[str, list[object]] = {}
    names = ["verifiable_relu"]
    names += [each.name for each in pkgutil.walk_packages(verifiable_relu.__path__, "verifiable_relu.")]
    for name in names:
        if name.endswith("__main__"):
            continue
        module = importlib.import_module(name)
        parts = name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(module)
        for key, value in vars(module).items():
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            if value.__module__.startswith("verifiable_relu") and value not in found.setdefault(key, []):
                found[key].append(value)
    return found


def holds(of: object, names: list[str]) -> bool:
    """Whether an object has attributes of attributes; a class has its fields and what its methods set, too."""
    for place, name in enumerate(names):
        if inspect.isclass(of) and not hasattr(of, name):
            if any(name in getattr(each, "__annotations__", {}) for each in of.__mro__):
                # What a field has is not known.
                return True
            return re.search(rf"self\.{name}\b", source(of)) is not None
        if inspect.ismodule(of) and not hasattr(of, name):
            try:
                of = importlib.import_module(f"{of.__name__}.{name}")
            except ImportError:
                return False
            continue
        if not hasattr(of, name):
            return False
        of = getattr(of, name)
        if place + 1 < len(names) and not (inspect.ismodule(of) or inspect.isclass(of)):
            return True
    return True


@cache
def source(of: object) -> str:
    """The source of a class; empty where there is none."""
    try:
        return inspect.getsource(of)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


@cache
def resolves(dotted: str) -> bool | None:
    """Whether a dotted name exists; None where its first part is no module and no name of this project."""
    parts = dotted.split(".")
    known = False
    for end in range(len(parts), 0, -1):
        for of in objects().get(".".join(parts[:end]), ()):
            known = True
            if holds(of, parts[end:]):
                return True
    if known or parts[0] in ("verifiable_relu", "benchmarks", "tests"):
        try:
            return importlib.util.find_spec(dotted) is not None
        except ImportError:
            return False
    return None


def unknown_keywords(call: str) -> list[str]:
    """The keyword arguments of a call that no function or class of this name takes."""
    try:
        tree = ast.parse(call.replace("…", "...").replace("..., ", "").replace(", ...", ""), mode="eval").body
    except SyntaxError:
        return []
    if not isinstance(tree, ast.Call):
        return []
    name, given = ast.unparse(tree.func), [each.arg for each in tree.keywords if each.arg]
    signatures = []
    for of in objects().get(name.rpartition(".")[2], ()):
        if callable(of):
            signatures.append(inspect.signature(of).parameters)
    if not signatures or not given:
        return []
    return [] if any(_takes(each, given) for each in signatures) else [f"{name}({', '.join(given)})"]


def _takes(parameters: object, given: list[str]) -> bool:
    kinds = list(parameters.values())  # type: ignore[attr-defined]
    return any(each.kind is each.VAR_KEYWORD for each in kinds) or {each.name for each in kinds} >= set(given)


def spans(text: str) -> Iterator[str]:
    """What stands between backticks, outside of fenced blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for found in re.findall(r"(?<!`)`(?!`)(.+?)(?<!`)`(?!`)", text, flags=re.DOTALL):
        yield re.sub(r"\s+", " ", found).strip()


def stale(text: str, own: frozenset[str] = frozenset()) -> list[str]:
    """The names and paths of this project in a text that do not exist, and calls with arguments that do not.

    Args:
        text: a page.
        own: names that stand for objects in its examples: what they have is not known.
    """
    found = []
    for span in spans(text):
        if _PATH.fullmatch(span):
            found += [] if exists(span) else [span]
        elif _CALL.fullmatch(span):
            found += unknown_keywords(span)
        elif _DOTTED.fullmatch(span) and not span.endswith(_FILES) and span.split(".")[0] not in own:
            found += [span] if resolves(span) is False and not foreign(span) else []
    return found


@cache
def files() -> tuple[str, ...]:
    """The files of the clone, each with a slash in front."""
    folders = ("verifiable_relu", "benchmarks", "tests", "docs", "examples", "specs")
    return tuple(f"/{path.relative_to(ROOT)}" for name in folders for path in (ROOT / name).rglob("*"))


def exists(path: str) -> bool:
    """Whether a path is the end of one in the clone."""
    return any(file.endswith(f"/{path.rstrip('/')}") for file in files())


@cache
def foreign(dotted: str) -> bool:
    """Whether a dotted name is that of something in another package."""
    first, *names = dotted.split(".")
    try:
        of: object = importlib.import_module(_ALIASES.get(first, first))
    except ImportError:
        return False
    return holds(of, names)
