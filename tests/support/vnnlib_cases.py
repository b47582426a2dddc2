"""Property files for tests: random formulas, an evaluator of their meaning, and damage to files.

The evaluator shares no code with the package's readers: it parses the s-expressions from text and evaluates them at
exact points.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verifiable_relu.spec import SpecFile

Point = Sequence[Fraction]


# ---- meaning ---------------------------------------------------------------------------------------------------


def expressions(text: str) -> list[Any]:
    """The s-expressions of a text as nested lists of words; an element ``X[0, 01]`` of 2.0 is the word ``X[0,1]``."""
    text = re.sub(r";[^\r\n]*", " ", text)
    stack: list[list[Any]] = [[]]
    for word in re.findall(r"[()]|[^()\s\[\]]+(?:\s*\[[^\]]*\])?", text):
        if word == "(":
            stack.append([])
        elif word == ")":
            closed = stack.pop()
            stack[-1].append(closed)
        else:
            stack[-1].append(re.sub(r"(?<=[\[,])0+(?=[0-9])", "", re.sub(r"\s", "", word)))
    (found,) = stack
    return found


def value(expression: Any, point: dict[str, Fraction]) -> Any:
    """The value of an expression at a point, which gives the value of each variable by its name."""
    if isinstance(expression, str):
        if expression in ("true", "false"):
            return expression == "true"
        return point[expression] if expression in point else Fraction(expression)
    operator, *arguments = expression
    values = [value(argument, point) for argument in arguments]
    match operator:
        case "and":
            return all(values)
        case "or":
            return any(values)
        case "not":
            return not values[0]
        case "=>":
            result = values[-1]
            for premise in reversed(values[:-1]):
                result = not premise or result
            return result
        case "distinct" | "!=":
            return len(set(values)) == len(values)
        case "<=" | "<" | ">=" | ">" | "=" | "==":
            return all(_COMPARED[operator](a, b) for a, b in pairwise(values))
        case "-" if len(values) == 1:
            return -values[0]
    result = values[0]
    for other in values[1:]:
        result = _COMBINED[operator](result, other)
    return result


_COMPARED: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "<=": lambda a, b: a <= b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    ">": lambda a, b: a > b,
    "=": lambda a, b: a == b,
    "==": lambda a, b: a == b,
}
_COMBINED: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def holds(text: str, point: dict[str, Fraction]) -> bool:
    """Whether all assertions of a file hold at a point."""
    return all(value(command[1], point) for command in expressions(text) if command[0] == "assert")


def reached(spec: SpecFile, point: dict[str, Fraction]) -> bool:
    """Whether the properties of a file, as it was read, call a point a counterexample."""
    if spec.joined is None:
        x, y = ([point[name] for name in each.elements("1.0")] for each in (spec.inputs, spec.outputs))
        return any(prop.box.contains(x) and prop.violated(y) for prop in spec.properties)
    inputs: dict[int, set[Fraction]] = {}
    outputs: dict[int, Fraction] = {}
    for network in spec.joined.networks:
        names = [name for tensor in network.inputs for name in tensor.elements(spec.version)]
        for name, place in zip(names, network.places, strict=True):
            inputs.setdefault(place, set()).add(point[name])
        names = [name for tensor in network.given for name in tensor.elements(spec.version)]
        outputs |= {network.start + i: point[name] for i, name in enumerate(names)}
    if any(len(values) > 1 for values in inputs.values()):
        return False
    x = [min(inputs[i]) for i in range(spec.joined.size)]
    y = [outputs[i] for i in range(len(outputs))] + (x if spec.joined.passed else [])
    for pair in spec.joined.products:
        first, second = (sum((c * y[i] for i, c in form), Fraction(constant)) for form, constant in pair)
        y.append(first * second)
    return any(prop.box.contains(x) and prop.violated(y) for prop in spec.properties)


# ---- random formulas -------------------------------------------------------------------------------------------


class Writer:
    """Random properties with ``inputs`` and ``outputs`` variables, in one of the two versions.

    Attributes:
        names: the variables, inputs first.
        numbers: all numbers that were written, so that tests can choose points on the boundaries.
    """

    def __init__(self, rng: random.Random, version: str) -> None:
        self.rng = rng
        self.version = version
        self.inputs, self.outputs = rng.randint(1, 3), rng.randint(1, 3)
        pattern = "{}_{}" if version == "1.0" else rng.choice(["{}[{}]", "{}[0,{}]"])
        self.shape = "[1,{}]" if "0," in pattern else "[{}]"
        self.names = [
            pattern.format(kind, i) for kind, n in (("X", self.inputs), ("Y", self.outputs)) for i in range(n)
        ]
        self.numbers: set[Fraction] = {Fraction(0), Fraction(1)}

    def number(self) -> str:
        rng = self.rng
        kinds = [
            lambda: f"{rng.randint(-3, 3)}.0",
            lambda: f"{rng.randint(-20, 20) / 10}",
            lambda: f"{rng.choice(['', '-'])}0.{rng.randrange(10**20):020d}",
        ]
        if self.version == "1.0":
            kinds += [
                lambda: str(rng.randint(-3, 3)),
                lambda: f"{rng.randint(-9, 9)}e{rng.choice(['', '-', '+'])}{rng.randint(0, 3)}",
                lambda: rng.choice([".5", "1.", "-.25", "+2", "1E-2", "0.5e1"]),
            ]
        text = rng.choice(kinds)()
        self.numbers.add(Fraction(text))
        return text

    def constant(self) -> str:
        rng = self.rng
        if rng.random() < 0.8:
            return self.number()
        operators = "+-*" if self.version == "2.0" else "+-*/"
        operator = rng.choice(operators)
        last = rng.choice(["2.0", "3.0", "-7.0"]) if operator == "/" else self.number()
        return f"({operator} {self.number()} {last})" if rng.random() < 0.8 else f"(- {self.number()})"

    def output(self) -> str:
        """A linear term over the outputs."""
        rng = self.rng
        y = rng.choice(self.names[self.inputs :])
        match rng.randrange(6):
            case 0 | 1:
                return y
            case 2:
                return f"(* {self.constant()} {y})" if rng.random() < 0.5 else f"(* {y} {self.constant()})"
            case 3:
                return f"({rng.choice('+-')} {' '.join(self.output() for _ in range(rng.randint(2, 3)))})"
            case 4:
                return f"(- {self.output()})"
        return f"({rng.choice('+-')} {self.output()} {self.constant()})"

    def input(self) -> str:
        """A linear term of one input."""
        x = self.rng.choice(self.names[: self.inputs])
        match self.rng.randrange(6):
            case 0:
                return f"(* {self.rng.choice(['2.0', '-0.5', '3.0'])} {x})"
            case 1:
                return f"(- {x})"
            case 2:
                return f"(+ {x} {self.constant()})"
        return x

    def atom(self) -> str:
        rng = self.rng
        equal, unequal = ("=", "distinct") if self.version == "1.0" else ("==", "!=")
        operator = rng.choice(["<=", ">=", "<", ">", "<=", ">=", equal, unequal])
        if rng.random() < 0.4:
            sides = [self.input(), self.constant()]
        else:
            sides = [self.output(), rng.choice([self.output, self.constant])()]
        rng.shuffle(sides)
        if self.version == "1.0" and rng.random() < 0.1:
            sides.insert(rng.randrange(3), self.constant())
        return f"({operator} {' '.join(sides)})"

    def formula(self, depth: int) -> str:
        rng = self.rng
        if depth == 0 or rng.random() < 0.25:
            return rng.choice(["true", "false"]) if self.version == "1.0" and rng.random() < 0.05 else self.atom()
        operators = ["and", "or", "and", "or"] + (["not", "=>"] if self.version == "1.0" else [])
        operator = rng.choice(operators)
        count = {"not": 1, "=>": rng.randint(2, 3)}.get(operator, rng.randint(1, 3))
        return f"({operator} {' '.join(self.formula(depth - 1) for _ in range(count))})"

    def box(self) -> list[str]:
        """Two bounds of each input, sometimes equal and sometimes strict."""
        rng, made = self.rng, []
        for x in self.names[: self.inputs]:
            low, high = sorted((self.number(), self.number()), key=Fraction)
            if rng.random() < 0.15:
                high = low
            strict = "" if Fraction(low) == Fraction(high) or rng.random() < 0.8 else "strict"
            below, above = (">", "<") if strict else (">=", "<=")
            made += [f"(assert ({below} {x} {low}))", f"(assert ({above} {x} {high}))"]
        return made

    def declarations(self) -> list[str]:
        if self.version == "1.0":
            return [f"(declare-const {name} Real)" for name in self.names]
        x, y = (self.shape.format(n) for n in (self.inputs, self.outputs))
        declared = [f"(declare-input X float32 {x})", f"(declare-output Y float32 {y})"]
        return ["(vnnlib-version <2.0>)", "(declare-network N", *declared, ")"]

    def text(self) -> str:
        """The text of a file: a box, sometimes as part of a disjunction, and up to three assertions."""
        rng = self.rng
        box = self.box()
        formulas = [f"(assert {self.formula(rng.randint(0, 3))})" for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            boxes = [[line[8:-1] for line in self.box()] for _ in range(rng.randint(2, 3))]
            parts = [f"(and {' '.join(bounds)} {self.formula(1)})" for bounds in boxes]
            box = [f"(assert (or {' '.join(parts)}))"]
        lines = box + formulas
        rng.shuffle(lines)
        ends = rng.choice(["\n", "\r\n", "\r", " ", "\n; (assert )\r"])
        return ends.join(self.declarations() + lines) + ends

    def point(self) -> dict[str, Fraction]:
        """A point most of whose coordinates equal a number of the file or lie close to one."""
        rng, known = self.rng, sorted(self.numbers)
        found = {}
        for name in self.names:
            beside = rng.choice([Fraction(0)] * 4 + [Fraction(1, 10**21), Fraction(-1, 10**21)])
            found[name] = rng.choice(known) * rng.choice([1, 1, 1, -1, 2]) + beside
            if rng.random() < 0.2:
                found[name] = Fraction(rng.randint(-40, 40), 10)
        return found


# ---- damage ----------------------------------------------------------------------------------------------------

_WORDS = (
    "( ) ) ( and or not => = == != distinct <= >= < > + - * / assert declare-const declare-fun declare-network exit "
    'check-sat push let ite X_0 Y_0 X_1 Y_7 |X_0| X[0] Y[0] X[-1] X[9] X[0,0] Y Real Int true false " | ; ;; "" || '
    "\r \n \0 é ≥ ٥ \ufeff 0 -0.0 1. .5 +1 1e400 1e-999 1e99999 -inf nan 0x10 #b1 1/3 00.1 1.2.3 -- [ ] [1] [0] [2,1] "
    "99999999999999999999 9999999999999999999999999999999.5 <2.0> float32 int8 (vnnlib-version (and) (or) (+) () (()) "
    "(assert) \x1b[31m \u202e \ud7ff"
)
WORDS = re.split(" ", _WORDS)


def exchanged(rng: random.Random, text: str) -> str:
    """A valid file in which some numbers, variables and operators are replaced by others of their kind."""
    tokens = re.findall(r"\s+|[()]|[^()\s]+", text)
    for kind in (r"[-+.0-9]*[0-9][-+.0-9eE]*", r"[XY][_\[].*", r"and|or", r"[<>=!]+|distinct", r"[-+]"):
        same = [at for at, token in enumerate(tokens) if re.fullmatch(kind, token)]
        for at in same:
            if rng.random() < 0.1:
                tokens[at] = tokens[rng.choice(same)]
    return "".join(tokens)


def damaged(rng: random.Random, text: str) -> bytes:
    """A valid file with one to four changes, of tokens or of bytes."""
    tokens = re.findall(r"\s+|[()\[\]]|[^()\[\]\s]+", text)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(tokens))
        match rng.randrange(9):
            case 0:
                del tokens[at : at + rng.randint(1, 3)]
            case 1:
                tokens.insert(at, tokens[at])
            case 2:
                other = rng.randrange(len(tokens))
                tokens[at], tokens[other] = tokens[other], tokens[at]
            case 3 | 4:
                tokens[at] = rng.choice(WORDS)
            case 5:
                tokens.insert(at, rng.choice(WORDS))
            case 6:
                tokens[at] = rng.choice(["(and ", "(- ", "(not ", "(+ ", "((", "(or "]) * rng.choice([1, 3, 2000])
            case 7:
                tokens = tokens[:at]
            case 8:
                tokens[at] = tokens[at] * rng.choice([2, 50, 5000])
        if not tokens:
            return b""
    data = bytearray("".join(tokens).encode("utf-8", "surrogatepass"))
    while data and rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)
