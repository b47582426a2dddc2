"""The examples of a Markdown page: what its fenced blocks say, and running them.

A block in ``python`` runs; all of a page are one program. A block in ``console`` has commands after ``$ `` and what
each prints, stdout before stderr: ``...`` stands for any text, and a last line ``[exit status N]`` for a status that is
not 0. A block in ``sh`` is for people and sets something up, one in ``text`` is no example. Any other is refused.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT, run

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
SET_UP = ("python3 dev.py ", ". .venv/bin/activate", "pip install ", "docker ")
"""How a command begins that is shown and not run."""
STATUS = re.compile(r"\n\[exit status (\d+)\]\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block: the page, the line at which it begins, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a ``console`` block, the text that it prints, and its exit status."""

    words: tuple[str, ...]
    expected: str
    status: int


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[2], re.sub(f"^{found[1]}", "", found[3], flags=re.M))
        for found in FENCE.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a ``console`` block."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.M)[1:]:
        line, _, expected = part.partition("\n")
        status = STATUS.search("\n" + expected)
        words = tuple(shlex.split(line))
        if words[0] == "verifiable-relu":
            words = ("python", "-m", "verifiable_relu", *words[1:])
        if words[:2] != ("python", "-m"):
            raise ValueError(f"{block}: '{line}' is no 'python -m MODULE' and no 'verifiable-relu COMMAND'")
        found.append(Command(words, STATUS.sub("\n", "\n" + expected).lstrip("\n"), int(status[1]) if status else 0))
    return found


def fits(expected: str, printed: str) -> bool:
    """Whether a text is as an example says, whose ``...`` stands for any text."""
    pattern = ".*?".join(re.escape(part) for part in expected.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def problems(page: Path, folder: Path) -> list[str]:
    """What is wrong with the examples of a page, which run in a folder with a link to ``specs`` and a list."""
    (folder / "specs").symlink_to(ROOT / "specs")
    rows = (f"specs/mnist_mlp.onnx,specs/mnist_mlp_mnist_{image}_eps3_100.vnnlib,30\n" for image in (0, 33))
    (folder / "few.csv").write_text("".join(rows))
    found, program = [], []
    for block in blocks(page):
        if block.language == "python":
            # Lines of the program are those of the page, so that a traceback names the right one.
            program += ["\n" * (block.line - sum(part.count("\n") for part in program)) + block.text]
        elif block.language == "sh":
            lines = [line for line in block.text.splitlines() if line.strip() and not line.startswith("    ")]
            found += [f"{block}: '{line}' sets nothing up" for line in lines if not line.startswith(SET_UP)]
        elif block.language not in ("console", "text"):
            found.append(f"{block}: a block in '{block.language}' is neither run nor marked as text")
    if program:
        done = run(["-c", "".join(program)], cwd=folder)
        if done.returncode:
            found.append(f"{page.name}: {done.stderr[-2000:]}")
    for block in blocks(page):
        for command in commands(block) if block.language == "console" else []:
            done = run(command.words[1:], cwd=folder)
            if done.returncode != command.status or not fits(command.expected, done.stdout + done.stderr):
                found.append(
                    f"{block}: {shlex.join(command.words)}: status {done.returncode}\n{done.stdout}{done.stderr}"
                )
    return found
