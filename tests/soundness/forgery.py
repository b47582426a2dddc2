"""What all forgers of certificates do: make them by several methods, change them, count what becomes of them."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from tests.support.asking import claims
from tests.support.certificates import Records, over_planes
from verifiable_relu.spec.property import Query
from verifiable_relu.trust.certificate import Cover, Proof
from verifiable_relu.verifiers.bab import Bab
from verifiable_relu.verifiers.bab.refine import Refinement
from verifiable_relu.verifiers.bab.search import Schedule
from verifiable_relu.verifiers.bab.tree import Branching
from verifiable_relu.verifiers.batch import Verifier
from verifiable_relu.verifiers.incomplete import Crown
from verifiable_relu.verifiers.split import InputSplit

SECONDS = 5.0
"""For one proof; a case that takes longer is left out."""


def decimal(value: Fraction) -> str:
    """A number whose denominator divides a power of ten, written without a quotient."""
    scale = 0
    while (value * 10**scale).denominator > 1:
        scale += 1
    digits = str(abs(value.numerator) * 10**scale // value.denominator).rjust(scale + 1, "0")
    return ("-" if value < 0 else "") + digits[: len(digits) - scale] + "." + (digits[len(digits) - scale :] or "0")


Prover = Callable[[Query], Proof | Cover | None]


def provers() -> list[Prover]:
    """Each makes certificates of another kind, or none of what it cannot prove."""
    search = Branching(steps=0, finishing=0)
    refining = Schedule(Refinement(leaves=8), first=0, patience=0)

    def by(verifier: Verifier) -> Prover:
        return lambda query: claims(verifier, [query], SECONDS)[0].proof

    return [
        by(Bab(search=search, record=True)),
        by(Crown(record=True)),
        by(Bab(search=search, rounds=refining, record=True)),
        by(InputSplit(batch=4, record=True)),
        lambda query: over_planes(query, search, seconds=SECONDS),
    ]


def lists(found: Records) -> list[list[int]]:
    """All lists of numbers of a certificate."""
    keys = ("lower", "upper", "slopes", "plain", "tree", "leaf", "rows", "row", "halve", "least", "zonotope", "chords")
    keys += ("plane", "parts", "bends", "terms", "below", "above")
    every = (record[key] for record in found for key in keys if key in record)
    return [value for value in every if isinstance(value, list) and value]


def forged(rng: random.Random, given: Records) -> Records:
    """A certificate with one to four changes."""
    found = copy.deepcopy(given)
    for _ in range(rng.choice([1, 1, 2, 4])):
        # What an earlier change has made strange is left alone.
        with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
            change(rng, found)
    return found


def change(rng: random.Random, found: Records) -> None:
    """One change of a certificate.

    Raises:
        IndexError: if there is nothing to change; and other exceptions for a certificate that is not of its form.
    """
    place, other = rng.randrange(1, len(found) - 1), rng.randrange(1, len(found) - 1)
    parts = [record["part"] for record in found if "part" in record]
    match rng.randrange(10):
        case 0 | 1 | 2 | 3:
            number(rng, rng.choice(lists(found)))
        case 4:
            found[place], found[other] = found[other], found[place]
        case 5:
            found.insert(place, copy.deepcopy(found[other]))
        case 6:
            del found[place]
        case 7:
            start = rng.choice([i for i, record in enumerate(found) if "root" in record])
            end = next(i for i in range(start + 1, len(found)) if "part" in found[i] or "end" in found[i])
            found[end:end] = copy.deepcopy(found[start:end])
            halve = [rng.randint(0, 1), rng.randint(-20, 20), rng.choice([0, -1, -3, -63, 60])]
            found.insert(start, {"halve": halve})
        case 8:
            row = rng.choice(rng.choice(rng.choice(parts)["polytopes"]))
            if rng.random() < 0.5:
                row["most"] = str(Fraction(row["most"]) + rng.choice([1, -1, Fraction(1, 1000), 100]))
            else:
                term = rng.choice(row["y"])
                term[1] = str(Fraction(term[1]) * rng.choice([2, -1, Fraction(1, 3)]))
        case 9:
            strange = [None, -1, 0, 1, 10**9, "1", [], [0], {}, True, [1 << 53, 900], "1e999", "-1/3", [0, None]]
            found[place][rng.choice(list(found[place]))] = rng.choice(strange)


def number(rng: random.Random, chosen: list[int]) -> None:
    """Change one number of a list: its exponent, or a mantissa."""
    place = rng.randrange(len(chosen)) if rng.random() < 0.7 else 0
    value = chosen[place]
    if place == 0:
        chosen[0] = value + rng.choice([1, -1, 1, -1, 4, -4, 30, -30, 900 - value, 500, -500, -900 - value])
    else:
        steps = [1, -1, 1 << rng.randrange(50), -(1 << rng.randrange(50)), -2 * value, value, -value]
        chosen[place] = value + rng.choice(steps)


@dataclass
class Findings:
    """What a number of forged certificates came to.

    Attributes:
        ended: how many were accepted, and how many refused.
        reasons: how many were refused with each reason, numbers and names left out.
        wrong: what is wrong, a line each.
    """

    ended: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def reason(message: str) -> str:
    """A message of the checker without its place, and without the numbers and names of one certificate."""
    message = message.split(": ", 1)[1] if message.startswith("record ") else message
    message = re.sub(r"'[^']*'", "…", message)
    message = re.sub(r"(a record of [a-z, ]+ is expected).*", r"\1", message)
    message = re.sub(r"\bnan\b|-?\binf\b|[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", message)
    return re.sub(r"#[#, ]*#", "#", message)[:120]
