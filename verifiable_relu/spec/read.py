"""The reading of VNN-LIB files, whose content tells whether they are 1.0 or 2.0, and the reader of 1.0.

VNN-LIB 1.0 is the subset of SMT-LIB in which properties of networks are written. The reader passes over the tokens
once, with a stack of open parentheses: when a parenthesis closes, its content becomes a term, a formula or a command.
Unlike in SMT-LIB, numbers may have a sign, an exponent, and no digits before or after the point (``-1e-5``, ``.5``,
``1.``), since many property files have such numbers, whose meaning is clear.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_text, require_plain
from verifiable_relu.rounding import above
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import (
    FALSE,
    ONE,
    TRUE,
    And,
    Block,
    Bound,
    Formula,
    LinearTerm,
    Not,
    Or,
    negate,
    number,
    properties,
)
from verifiable_relu.spec.property import Row, round_down
from verifiable_relu.spec.relations import Relations, implied
from verifiable_relu.spec.specfile import Declared, DeclaredTensor, Joined, SpecFile, Variable, stem

# Strings and quoted symbols may hold semicolons. The quantifiers are possessive, which rules out backtracking.
_OPAQUE = re.compile(r';[^\n]*+|"(?:[^"]++|"")*+"|\|[^|]*+\||["|]')
_WORD = r'[^ \t\n()"|]++'
# Most of every file is parentheses around three words, such as (<= X_0 1.0). One match takes such a group, for speed.
_TOKEN = re.compile(
    rf"""[ \t\n]*+(?:\([ \t\n]*+({_WORD})[ \t\n]++({_WORD})[ \t\n]++({_WORD})[ \t\n]*+\)"""
    rf"""|([()]|{_WORD}|"(?:[^"]++|"")*+"|\|[^|]*+\|))"""
)
# Many bounds of inputs, as (<= X_0 1.0), after one another.
_BOUND = r"\([ \t\n]*+[<>]=[ \t\n]++X_[0-9]++[ \t\n]++[-+.0-9eE]++[ \t\n]*+\)"
_RUN = re.compile(rf"[ \t\n]*+(?:{_BOUND}[ \t\n]*+){{{limits.RUN[0]},{limits.RUN[1]}}}+")
_NETWORK = re.compile(r";+[ \t]*network:[ \t]*(\S.*?\.onnx(?:\.gz)?)[ \t]*", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The text of a property file without its comments.

    Attributes:
        text: the text in ASCII; every line end is a line feed, tokens have the lines and columns that they have in the
            file, and white space at the end is cut off.
        network: the file that a comment ``; network: file.onnx`` names; None without such a comment.
    """

    text: str
    network: str | None

    def tokens(
        self, most: int = limits.TOKENS, block: Callable[[int, int], bool] = lambda start, end: False
    ) -> Iterator[tuple[str | tuple[str, str, str], int, int]]:
        """The tokens of the text: parentheses, words, strings and quoted symbols.

        Args:
            most: how many there may be.
            block: is told where many bounds of inputs behind an ``and`` begin and end, and says whether they are taken
                as a whole; they are then no tokens.

        Yields:
            A token and the positions of its beginning and end in ``text``. Three words in parentheses are yielded as
            one tuple of the words.

        Raises:
            InputError: for more than ``most`` tokens, or more than ``limits.DEPTH`` parentheses open at once.
        """
        count = depth = end = 0
        found: str | tuple[str, str, str] = ""
        while True:
            while found == "and" and (run := _RUN.match(self.text, end)) and block(*run.span()):
                end = run.end()
            match = _TOKEN.match(self.text, end)
            if match is None:
                return
            first, second, third, token = match.groups()
            end = match.end()
            if token is None:
                count += 5
                start, deepest = self.text.rindex("(", 0, match.start(1)), depth + 1
                found = first, second, third
            else:
                count += 1
                depth += 1 if token == "(" else -1 if token == ")" else 0
                start, deepest = end - len(token), depth
                found = token
            if deepest > limits.DEPTH or count > most:
                what = f"{most:,} words and parentheses" if count > most else f"{limits.DEPTH:,} open parentheses"
                raise InputError(f"more than {what}", place=self.place(start))
            yield found, start, end

    @property
    def version(self) -> str:
        """The version of VNN-LIB, "2.0" if the first command exists in 2.0 only, else "1.0"."""
        match [token for token, _, _ in islice(self.tokens(), 2)]:
            case [(head, _, _), *_] | ["(", head] if head in _OF_2:
                return "2.0"
        return "1.0"

    def line(self, position: int) -> int:
        """The number, from 1, of the line that a position lies in."""
        return self.text.count("\n", 0, position) + 1

    def place(self, position: int) -> str:
        """Line and column of a position, for messages."""
        return f"line {self.line(position)}, column {position - self.text.rfind(chr(10), 0, position)}"

    def quote(self, start: int, end: int) -> str:
        """The text between two positions as one line of at most 100 characters."""
        return _short(" ".join(self.text[start : min(end, start + 1000)].split()))

    def quoted_line(self, number: int) -> str:
        """The line with a number, cut to 100 characters; empty if the text has no such line."""
        lines = self.text.split("\n", number)
        return _short(lines[number - 1].strip()) if 0 < number <= len(lines) else ""


def source(text: str) -> Source:
    """The text of a property file without its comments.

    A comment runs from a semicolon to the end of the line, which is a line feed or a carriage return, as SMT-LIB 2.6
    (section 3.1) has it. A semicolon within a string or a quoted symbol begins no comment.

    Raises:
        InputError: for a text that does not begin with a parenthesis; a control character (``files.require_plain``); a
            string or quoted symbol without end; a character outside of ASCII, other than in comments, strings and
            quoted symbols; more than ``limits.OPAQUE`` comments, strings and quoted symbols; or comments that name
            different networks.
    """
    require_plain(text)
    if sum(map(text.count, ';"|')) > limits.OPAQUE:
        raise InputError(f"more than {limits.OPAQUE:,} comments, strings and quoted symbols")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    networks: list[str] = []

    def without(match: re.Match[str]) -> str:
        found = match.group()
        if found[0] == ";":
            if named := _NETWORK.fullmatch(found):
                networks.append(named[1])
            return ""
        if len(found) == 1:
            what = "a string" if found == '"' else "a quoted symbol"
            raise InputError(f"{what} is never closed", place=Source(text, None).place(match.start()))
        return found if found.isascii() else found.encode("ascii", "replace").decode()

    made = Source(_OPAQUE.sub(without, text).rstrip(" \t\n"), next(iter(networks), None))
    if made.text.lstrip()[:1] not in ("", "(", ")"):
        # A list from elsewhere may name any file of this machine, of which messages are to show nothing.
        raise InputError("no property: its first word is outside of parentheses")
    if not made.text.isascii():
        position, character = next((i, c) for i, c in enumerate(made.text) if not c.isascii())
        raise InputError(f"the character '{character}' is not ASCII", place=made.place(position))
    if len(set(networks)) > 1:
        raise InputError(
            f"comments name two networks, {networks[0]} and {next(n for n in networks if n != networks[0])}"
        )
    return made


def _short(text: str, most: int = 100) -> str:
    """What messages quote of a text: ``most`` characters."""
    return text if len(text) <= most else text[: most - 2] + " …"


def _shown(token: str) -> str:
    return _short(token, 40)


_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
_VARIABLE = re.compile(r"([XY])_(0|[1-9][0-9]*)")
_QUOTED = re.compile(r"\|([XY]_[0-9]+)\|")
_LONGEST_INDEX = 9
_REMEMBERED = 500_000
"""The most tokens of variables and numbers whose terms are kept, because files repeat the same numbers."""
_COMPARISONS = ("<=", "<", ">=", ">", "=")
_IGNORED = {"set-logic", "set-info", "set-option"}
_QUESTIONS = {"check-sat", "get-model", "get-value", "exit"}
_COMMANDS = {"declare-const", "declare-fun", "assert", *_IGNORED, *_QUESTIONS}
_OF_2 = {"vnnlib-version", "declare-network"}


class _Reader:
    """The state of reading one file.

    Attributes:
        source: the text.
        arithmetic: the arithmetic of the file's terms.
        terms: the term of each token that stands for a variable or a number.
        inputs: the index of each input by its name.
        numbers: what ``number`` returned.
        declared: the indices of the declared variables, inputs under "X" and outputs under "Y".
        asserted: the asserted formulas.
        question: the first command that asks for an answer, such as "check-sat"; empty before it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.arithmetic = Relations(0, 0)
        self.terms: dict[str, LinearTerm] = {}
        self.inputs: dict[str, int] = {}
        self.numbers: dict[str, tuple[float, float, Fraction | None]] = {}
        self.declared: dict[str, list[int]] = {"X": [], "Y": []}
        self.asserted: list[Formula] = []
        self.question = ""

    def read(self, path: Path) -> SpecFile:
        self.evaluate()
        inputs, outputs = self.variable("X", "input"), self.variable("Y", "output")
        formula, joined = And(tuple(self.asserted)), None
        if self.arithmetic.used:
            formula = And((formula, *implied(formula, outputs.size, inputs.size)))
            ports = ((DeclaredTensor(each, "Real", ""),) for each in (inputs, outputs))
            network = Declared("network", "", next(ports), (), next(ports), tuple(range(inputs.size)), 0)
            joined = Joined((network,), inputs.size, True, tuple(self.arithmetic.products))
        found = properties(formula, inputs.size, lambda i: f"X_{i}", stem(path), self.source.place)
        return SpecFile(path, "1.0", found, inputs, outputs, joined=joined)

    def evaluate(self) -> None:
        """Execute all commands of the file.

        A frame of the stack belongs to an open parenthesis: a list of its position and of its content so far.
        """
        place, stack = self.source.place, list[list[Any]]()

        def block(start: int, end: int) -> bool:
            found = self.block(start, end) if stack[0][1:2] == ["assert"] else None
            if found is not None:
                stack[-1].append(found)
            return found is not None

        for token, start, end in self.source.tokens(block=block):
            if token == "(":
                stack.append([start])
            elif token == ")":
                if not stack:
                    raise InputError("a closing parenthesis has no opening one", place=place(start))
                self.close(stack.pop(), stack, end)
            elif isinstance(token, tuple):
                if stack and token[0] in _COMMANDS:
                    raise self.unclosed(stack[0][0])
                self.close([start, *token], stack, end)
            elif not stack:
                raise InputError(f"'{_shown(token)}' is outside of parentheses", place=place(start))
            else:
                if len(stack) > 1 and len(stack[-1]) == 1 and token in _COMMANDS:
                    raise self.unclosed(stack[0][0])
                stack[-1].append(token)
                if len(stack[-1]) > limits.WORDS:
                    raise InputError(f"more than {limits.WORDS:,} words in one parenthesis", place=place(start))
        if stack:
            raise self.unclosed(stack[0][0])

    def block(self, start: int, end: int) -> Block | None:
        """The bounds of inputs between two positions; None if they are to be read one by one."""
        words = self.source.text[start:end].replace("(", " ").replace(")", " ").split()
        names, numbers = words[1::3], words[2::3]
        try:
            variables = np.array([self.inputs[name] for name in names])
            read = [self.numbers.get(word) or self.number(word) for word in numbers]
        except (InputError, KeyError):
            return None
        upper = np.array([word == "<=" for word in words[0::3]])
        if np.bincount(2 * variables + upper).max() > 1:
            return None
        values = np.array([number[side] for number, side in zip(read, upper.tolist(), strict=True)])
        exact = {place: number[2] for place, number in enumerate(read) if number[2] is not None}
        return Block(variables, upper, values, exact, lambda: self.bounds(start, end))

    def bounds(self, start: int, end: int) -> Iterator[Bound]:
        """The bounds of inputs between two positions, one by one."""
        for match in _TOKEN.finditer(self.source.text, start, end):
            operator, name, word = match.groups()[:3]
            if operator is not None:
                position = self.source.text.rindex("(", start, match.start(1))
                yield Bound(self.inputs[name], operator == "<=", _number(word), False, position)

    def number(self, word: str) -> tuple[float, float, Fraction | None]:
        """A number rounded down and up, and itself where float64 does not represent it.

        Raises:
            InputError: if a bound cannot have it.
        """
        value = _number(word)
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > limits.BITS:
            raise InputError("a long number")
        low = round_down(value)
        found = (low, low, None) if Fraction(low) == value else (low, above(low), value)
        if math.isinf(found[1]):
            raise InputError("a number beyond the range of float64")
        if len(self.numbers) < _REMEMBERED:
            self.numbers[word] = found
        return found

    def close(self, frame: list[Any], stack: list[list[Any]], end: int) -> None:
        """Execute a complete frame as a command, or add its term or formula to the frame around it."""
        try:
            if not stack:
                self.command(frame)
            else:
                stack[-1].append(self.value(frame) if stack[0][1:2] == ["assert"] else frame)
        except InputError as error:
            said = f"{error.message}: {self.source.quote(frame[0], end)}"
            raise type(error)(said, place=self.source.place(frame[0])) from None

    def unclosed(self, position: int) -> InputError:
        return InputError("this parenthesis is never closed", place=self.source.place(position))

    def command(self, frame: list[Any]) -> None:
        match frame[1:]:
            case ["assert" | "declare-const" | "declare-fun" as head, *_] if self.question:
                # An SMT solver answers a question about the assertions before it alone.
                raise InputError(f"'{head}' comes after '{self.question}'")
            case ["assert", body]:
                self.asserted.append(self.formula(body))
            case ["declare-const", str(name), str(sort)]:
                self.declare(name, sort, frame[0])
            case ["declare-fun", str(name), [_], str(sort)]:
                self.declare(name, sort, frame[0])
            case [str(head), *_] if head in _IGNORED:
                pass
            case [str(head), *_] if head in _QUESTIONS:
                self.question = head
            case [str(head), *_] if head in _COMMANDS:
                raise InputError(f"'{head}' has the wrong number or kind of arguments")
            case [str(head), *_] if head in _OF_2:
                raise InputError(f"'{head}' is a command of VNN-LIB 2.0, whose files begin with (vnnlib-version <2.0>)")
            case [str(head), *_]:
                raise UnsupportedError(f"the command '{_shown(head)}' is not supported")
            case _:
                raise InputError("a command is expected")

    def declare(self, name: str, sort: str, position: int) -> None:
        name = _unquoted(name)
        match = _VARIABLE.fullmatch(name)
        if not match:
            raise UnsupportedError(f"'{_shown(name)}' is neither an input X_i nor an output Y_i")
        if len(match.group(2)) > _LONGEST_INDEX:
            raise InputError(f"the index of '{_shown(name)}' is too large")
        if sort != "Real":
            raise UnsupportedError(f"'{name}' is of sort {_shown(sort)}, only Real is supported")
        if name in self.terms:
            raise InputError(f"'{name}' is declared twice")
        if self.arithmetic.used:
            raise InputError(f"'{name}' is declared after a condition that relates inputs or multiplies variables")
        kind, index = match.group(1), int(match.group(2))
        self.declared[kind].append(index)
        self.arithmetic.start, self.arithmetic.size = len(self.declared["Y"]), len(self.declared["X"])
        one = {index: ONE}
        if kind == "X":
            self.inputs[name] = index
        self.terms[name] = LinearTerm(one) if kind == "X" else LinearTerm(outputs=one)

    def variable(self, kind: str, role: str) -> Variable:
        numbers = self.declared[kind]
        if not numbers:
            empty = not self.source.text.strip()
            raise InputError("the file is empty" if empty else f"no {role} variables ({kind}_0 …) are declared")
        missing = next((i for i, number in enumerate(sorted(numbers)) if i != number), None)
        if missing is not None:
            raise InputError(f"{kind}_{missing} is not declared, but {kind}_{max(numbers)} is")
        return Variable(kind, (len(numbers),))

    def value(self, frame: list[Any]) -> LinearTerm | Formula:
        """The term or formula of a complete frame inside an assertion."""
        match frame:
            case [position, str(head), *arguments]:
                pass
            case _:
                raise InputError("an operator is expected after '('")
        if head in _COMPARISONS or head == "distinct":
            if len(arguments) < 2:
                raise InputError(f"'{head}' needs two arguments")
            terms = [self.term(argument) for argument in arguments]
            if head == "distinct":
                return self.arithmetic.distinct(terms, position)
            found = tuple(self.arithmetic.compare(head, left, right, position) for left, right in pairwise(terms))
            return found[0] if len(found) == 1 else And(found)
        if not arguments and head in ("+", "-", "*", "/", "and", "or", "=>"):
            raise InputError(f"'{head}' needs an argument")
        if head in ("+", "-", "*", "/"):
            return self.arithmetic.apply(head, [self.term(argument) for argument in arguments])
        if head in ("and", "or", "not", "=>"):
            return self.connective(head, [self.formula(argument) for argument in arguments])
        raise UnsupportedError(f"the operator '{_shown(head)}' is not supported")

    def connective(self, operator: str, parts: Sequence[Formula]) -> Formula:
        match operator, parts:
            case "and", _:
                return And(tuple(parts))
            case "or", _:
                return Or(tuple(parts))
            case "not", [part]:
                return negate(part)
            case "=>", [*premises, conclusion] if premises:
                return Or((*map(negate, premises), conclusion))
        raise InputError(f"'{operator}' has the wrong number of arguments")

    def term(self, item: Any) -> LinearTerm:
        if isinstance(item, LinearTerm):
            return item
        if not isinstance(item, str):
            raise InputError("a number is expected where a condition stands")
        known = self.terms.get(item)
        if known is None:
            known = self.terms.get(_unquoted(item)) or LinearTerm(constant=_number(item))
            if len(self.terms) < _REMEMBERED:
                self.terms[item] = known
        return known

    def formula(self, item: Any) -> Formula:
        if isinstance(item, Bound | Block | Row | And | Or | Not):
            return item
        if item in ("true", "false"):
            return TRUE if item == "true" else FALSE
        what = f"'{_shown(item)}'" if isinstance(item, str) else "a number"
        raise InputError(f"a condition is expected where {what} stands")


def _unquoted(name: str) -> str:
    """The name of a variable, without the bars if it is written as a quoted symbol: ``X_0`` for ``|X_0|``."""
    match = _QUOTED.fullmatch(name)
    return match[1] if match else name


def _number(token: str) -> Fraction:
    # The length is checked first, because matching the pattern with a million digits takes long.
    if len(token) > limits.DIGITS and token[0] in "+-.0123456789":
        return number(token)
    if _NUMERAL.fullmatch(token):
        return number(token)
    if token.lstrip("+-").lower() in ("nan", "inf", "infinity", "oo"):
        raise InputError(f"'{token}' is not a finite number")
    if re.fullmatch(r"[+-]?[0-9.]+[eE][+-]?[0-9]+", token):
        raise InputError(f"the exponent of '{_shown(token)}' is out of range")
    raise InputError(f"'{_shown(token)}' is neither a number nor a declared variable")


def read_vnnlib(path: Path | str, text: str | None = None) -> SpecFile:
    """Read a property file, ``.vnnlib`` or ``.vnnlib.gz``.

    A file whose first command exists in VNN-LIB 2.0 only is read as 2.0, any other file as 1.0.

    Args:
        path: the file.
        text: its text, where that has been read.

    Raises:
        InputError: if the file is no well-formed property or exceeds ``spec.limits``; with file, line and reason.
        UnsupportedError: for a well-formed property that is no union of input boxes with output polytopes.
    """
    path = Path(path)
    with located(path):
        return parse(read_text(path, limits.BYTES) if text is None else text, path)


@contextmanager
def located(path: Path) -> Iterator[None]:
    """Have errors of the reading of a file name it."""
    try:
        yield
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None
    except MemoryError:
        raise InputError("reading the file takes more memory than there is", path=path) from None


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a property file; the properties are named after ``path``.

    Raises:
        InputError, UnsupportedError: as ``read_vnnlib`` does, but naming no file.
    """
    found = source(text)
    # Imported here, because the import of the package vnnlib, which 2.0 alone needs, takes long.
    if found.version == "2.0":
        from verifiable_relu.spec import vnnlib2

        spec = vnnlib2.parse(found, path)
    else:
        spec = _Reader(found).read(path)
    return replace(spec, network=found.network)
