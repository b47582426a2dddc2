"""The reading of VNN-LIB files, whose content tells whether they are 1.0 or 2.0, and the reader of 1.0.

VNN-LIB 1.0 is a subset of SMT-LIB. The reader passes over the tokens once: when a parenthesis closes, its content
becomes a term, a formula or a command. Unlike in SMT-LIB, numbers may be written as ``-1e-5``, ``.5`` or ``1.``.
"""

from __future__ import annotations

import re
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.files import read_text
from verifiable_relu.spec import limits
from verifiable_relu.spec.formula import (
    FALSE,
    TRUE,
    And,
    Formula,
    InputBound,
    LinearTerm,
    Or,
    TermArithmetic,
    negate,
    properties,
)
from verifiable_relu.spec.specfile import DeclaredNetwork, JoinedNetwork, SpecFile, Variable, stem
from verifiable_relu.spec.text import PropertyText, Words, shortened

# Many bounds of inputs, as (<= X_0 1.0), after one another.
_BOUND = re.compile(r"\([ \t\n]*+([<>]=)[ \t\n]++(X_[0-9]++)[ \t\n]++([-+.0-9eE]++)[ \t\n]*+\)")
_RUN = re.compile(rf"[ \t\n]*+(?:{_BOUND.pattern}[ \t\n]*+){{{limits.RUN[0]},{limits.RUN[1]}}}+")
_NUMERAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
# A name may be written as a quoted symbol: |X_0| is X_0.
_VARIABLE = re.compile(r"(\|?)(([XY])_(0|[1-9][0-9]*))\1")
_LONGEST_INDEX = 9
# The most words, and groups of three words, whose meaning is kept, because files repeat the same ones.
_REMEMBERED = 500_000
_COMPARISONS, _ARITHMETIC = ("<=", "<", ">=", ">", "=", "distinct"), ("+", "-", "*", "/")
_IGNORED = {"set-logic", "set-info", "set-option"}
_QUESTIONS = {"check-sat", "get-model", "get-value", "exit"}
_COMMANDS = {"declare-const", "declare-fun", "assert", *_IGNORED, *_QUESTIONS}
_OF_2 = {"vnnlib-version", "declare-network"}


class _Vnnlib1Reader:
    """The state of reading one file."""

    def __init__(self, source: PropertyText) -> None:
        self.source, self.arithmetic = source, TermArithmetic()
        # A frame for each open parenthesis: its position, and its content so far.
        self.stack: list[list[Any]] = []
        self.terms: dict[str, LinearTerm] = {}
        self.groups: dict[Words, Any] = {}
        self.declared: dict[str, list[int]] = {"X": [], "Y": []}
        self.asserted: list[Formula] = []
        self.question = ""

    def read(self, path: Path) -> SpecFile:
        self.evaluate()
        inputs, outputs = self.variable("X", "input"), self.variable("Y", "output")
        joined = None
        if self.arithmetic.related:
            places = tuple(range(inputs.size))
            network = DeclaredNetwork("network", "", (inputs,), (), (outputs,), places, 0)
            joined = JoinedNetwork((network,), inputs.size, True, tuple(self.arithmetic.products))
        found = properties(And(self.asserted), self.arithmetic, "X_{}".format, stem(path), self.place)
        return SpecFile(path, "1.0", found, inputs, outputs, network=self.source.network, joined=joined)

    def evaluate(self) -> None:
        place, stack = self.source.place, self.stack
        for token, start, end in self.source.tokens(limits.TOKENS, self.bounds):
            if token == "(":
                stack.append([start])
            elif token == ")":
                if not stack:
                    raise InputError("a closing parenthesis has no opening one", place=place(start))
                self.close(stack.pop(), end)
            elif isinstance(token, tuple):
                if stack and token[0] in _COMMANDS:
                    raise self.unclosed()
                if self.in_assertion and (known := self.groups.get(token)) is not None:
                    stack[-1].append(known)
                else:
                    self.close([start, *token], end)
            elif not stack:
                raise InputError(f"'{shortened(token)}' is outside of parentheses", place=place(start))
            else:
                if len(stack) > 1 and len(stack[-1]) == 1 and token in _COMMANDS:
                    raise self.unclosed()
                stack[-1].append(token)
                if len(stack[-1]) > limits.WORDS:
                    raise InputError(f"more than {limits.WORDS:,} words in one parenthesis", place=place(start))
        if stack:
            raise self.unclosed()

    @property
    def in_assertion(self) -> bool:
        return bool(self.stack) and self.stack[0][1:2] == ["assert"]

    def bounds(self, start: int) -> int:
        """Read many bounds of inputs that follow each other; returns the position behind those that were read."""
        text = self.source.text
        while self.in_assertion and (run := _RUN.match(text, start)):
            known, found = self.groups.get, _BOUND.findall(text, *run.span())
            try:
                self.stack[-1] += [known(words) or self.group(words, (start, words)) for words in found]
            except InputError:  # They are read one by one, which names the place.
                break
            start = run.end()
        return start

    def place(self, mark: int | tuple[int, Words]) -> str:
        """Return line and column of a bound: its position, or the words of a bound behind a position."""
        if isinstance(mark, tuple):
            found = _BOUND.finditer(self.source.text, mark[0])
            mark = next(each.start() for each in found if each.groups() == mark[1])
        return self.source.place(mark)

    def group(self, words: Words, position: int | tuple[int, Words]) -> LinearTerm | Formula:
        if (found := self.groups.get(words)) is None:
            found = self.value([position, *words])
            if len(self.groups) < _REMEMBERED:
                self.groups[words] = found
        return found

    def close(self, frame: list[Any], end: int) -> None:
        try:
            if not self.stack:
                self.command(frame)
            elif not self.in_assertion:
                self.stack[-1].append(frame)
            elif len(frame) == 4 and all(isinstance(word, str) for word in frame[1:]):
                self.stack[-1].append(self.group((frame[1], frame[2], frame[3]), frame[0]))
            else:
                self.stack[-1].append(self.value(frame))
        except InputError as error:
            words = self.source.text[frame[0] : min(end, frame[0] + 1000)].split()
            said = f"{error.message}: {shortened(' '.join(words), 100)}"
            raise type(error)(said, place=self.source.place(frame[0])) from None

    def unclosed(self) -> InputError:
        return InputError("this parenthesis is never closed", place=self.source.place(self.stack[0][0]))

    def command(self, frame: list[Any]) -> None:
        match frame[1:]:
            case ["assert" | "declare-const" | "declare-fun" as head, *_] if self.question:
                # An SMT solver answers a question about the assertions before it alone.
                raise InputError(f"'{head}' comes after '{self.question}'")
            case ["assert", body]:
                self.asserted.append(self.formula(body))
            case ["declare-const", str(name), str(sort)] | ["declare-fun", str(name), [_], str(sort)]:
                self.declare(name, sort)
            case [str(head), *_] if head in _IGNORED | _QUESTIONS:
                self.question = head if head in _QUESTIONS else self.question
            case [str(head), *_] if head in _COMMANDS:
                raise InputError(f"'{head}' has the wrong number or kind of arguments")
            case [str(head), *_] if head in _OF_2:
                raise InputError(f"'{head}' is a command of VNN-LIB 2.0, whose files begin with (vnnlib-version <2.0>)")
            case [str(head), *_]:
                raise UnsupportedError(f"the command '{shortened(head)}' is not supported")
            case _:
                raise InputError("a command is expected")

    def declare(self, name: str, sort: str) -> None:
        match = _VARIABLE.fullmatch(name)
        if not match:
            raise UnsupportedError(f"'{shortened(name)}' is neither an input X_i nor an output Y_i")
        name, kind, digits = match[2], match[3], match[4]
        if len(digits) > _LONGEST_INDEX:
            raise InputError(f"the index of '{shortened(name)}' is too large")
        if sort != "Real":
            raise UnsupportedError(f"'{name}' is of sort {shortened(sort)}, only Real is supported")
        if name in self.terms:
            raise InputError(f"'{name}' is declared twice")
        if self.arithmetic.related:
            raise InputError(f"'{name}' is declared after a condition that relates inputs or multiplies variables")
        index = int(digits)
        self.declared[kind].append(index)
        self.arithmetic.outputs, self.arithmetic.inputs = len(self.declared["Y"]), len(self.declared["X"])
        self.terms[name] = self.terms[f"|{name}|"] = LinearTerm.variable(~index if kind == "X" else index)

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
        position, *words = frame
        if not (words and isinstance(words[0], str)):
            raise InputError("an operator is expected after '('")
        head, *arguments = words
        if head in _COMPARISONS and len(arguments) < 2:
            raise InputError(f"'{head}' needs two arguments")
        if not arguments and head in (*_ARITHMETIC, "and", "or", "=>"):
            raise InputError(f"'{head}' needs an argument")
        if head in _ARITHMETIC:
            return self.arithmetic.apply(head, [self.term(argument) for argument in arguments])
        if head in _COMPARISONS:
            terms = [self.term(argument) for argument in arguments]
            if head == "distinct" and len(terms) * (len(terms) - 1) // 2 > limits.PAIRS:
                raise UnsupportedError(f"'distinct' of {len(terms):,} terms makes more than {limits.PAIRS:,} pairs")
            operator, pairs = ("!=", combinations(terms, 2)) if head == "distinct" else (head, pairwise(terms))
            found = [self.arithmetic.compare(operator, left, right, position) for left, right in pairs]
            return found[0] if len(found) == 1 else And(found)
        if head not in ("and", "or", "not", "=>"):
            raise UnsupportedError(f"the operator '{shortened(head)}' is not supported")
        parts = [each if type(each) is InputBound else self.formula(each) for each in arguments]
        if head in ("and", "or"):
            return And(parts) if head == "and" else Or(parts)
        if (head == "not") != (len(parts) == 1):
            raise InputError(f"'{head}' has the wrong number of arguments")
        *premises, last = parts
        return negate(last) if head == "not" else Or([*map(negate, premises), last])

    def term(self, item: Any) -> LinearTerm:
        if isinstance(item, LinearTerm):
            return item
        if not isinstance(item, str):
            raise InputError("a number is expected where a condition stands")
        if (known := self.terms.get(item)) is None:
            known = _number(item)
            if len(self.terms) < _REMEMBERED:
                self.terms[item] = known
        return known

    def formula(self, item: Any) -> Formula:
        if isinstance(item, Formula):
            return item
        if item in ("true", "false"):
            return TRUE if item == "true" else FALSE
        what = f"'{shortened(item)}'" if isinstance(item, str) else "a number"
        raise InputError(f"a condition is expected where {what} stands")


def _number(token: str) -> LinearTerm:
    # The length is checked first, because matching the pattern with a million digits takes long.
    if (len(token) > limits.DIGITS and token[0] in "+-.0123456789") or _NUMERAL.fullmatch(token):
        return LinearTerm.number(token)
    if token.lstrip("+-").lower() in ("nan", "inf", "infinity", "oo"):
        raise InputError(f"'{token}' is not a finite number")
    if re.fullmatch(r"[+-]?[0-9.]+[eE][+-]?[0-9]+", token):
        raise InputError(f"the exponent of '{shortened(token)}' is out of range")
    raise InputError(f"'{shortened(token)}' is neither a number nor a declared variable")


def read_vnnlib(path: Path | str, text: str | None = None) -> SpecFile:
    """Read a property file, ``.vnnlib`` or ``.vnnlib.gz``, or its ``text`` where that has been read.

    A file whose first command exists in VNN-LIB 2.0 only is read as 2.0, any other file as 1.0.

    Raises:
        InputError: if the file is no well-formed property or exceeds ``spec.limits``; with file, line and reason.
        UnsupportedError: for a well-formed property that is no union of input boxes with output polytopes.
    """
    path = Path(path)
    try:
        return parse(read_text(path, limits.BYTES) if text is None else text, path)
    except InputError as error:
        raise error.located(path) from None
    except RecursionError:
        raise InputError("conditions are nested too deeply", path=path) from None
    except MemoryError:
        raise InputError("there is not enough memory to read the file", path=path) from None


def parse(text: str, path: Path) -> SpecFile:
    """Read the text of a property file; the properties are named after ``path``, errors name no file."""
    source = PropertyText.without_comments(text)
    match [token for token, _, _ in islice(source.tokens(limits.TOKENS), 2)]:
        case [(head, _, _), *_] | ["(", head] if head in _OF_2:
            # Imported here, because the import of the package vnnlib, which 2.0 alone needs, takes long.
            from verifiable_relu.spec import vnnlib2

            return vnnlib2.parse(source, path)
    return _Vnnlib1Reader(source).read(path)
