"""The page on certificates suffices to write a checker: one written from it alone agrees with the project's.

``page_checker`` accepts every certificate that the verifier's methods write of small networks of each kind: piecewise
linear ones, pairs, families, curves, quantised files, and what runs in an arithmetic. Of certificates that are changed
at random both accept the same, but where the project's leaves an inequality undecided between rounding and the truth:
it may refuse what the other, which rounds nowhere, accepts by less than that. What each arithmetic charges is compared
as a number.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from tests.soundness import forged_dense, forged_networks, onnx_exact, page_checker, page_network
from tests.soundness import test_certified_arithmetic as arithmetics
from tests.soundness import test_certified_pairs as pairs
from tests.soundness import test_certified_quantised as quantised
from tests.soundness.forged import certificate
from tests.soundness.forgery import decimal, forged
from tests.support.asking import claims
from tests.support.certificates import (
    Case,
    Records,
    checked,
    cover_case,
    one_point,
    planes_case,
    records,
    refined_case,
    tree_case,
    written,
)
from tests.support.draws import draws
from tests.support.processes import run
from tests.support.solver_cases import ball, random_query, row
from tests.unit import test_check_curves as curves
from tests.unit.test_check_kinds import question
from tests.unit.test_quantised import Graph, u8
from verifiable_relu import verify
from verifiable_relu.campaign.certificates import proofs
from verifiable_relu.check import BadInput, Refused, check
from verifiable_relu.errors import InputError
from verifiable_relu.network import from_torch, hardened, read_onnx, write_onnx
from verifiable_relu.spec.property import Box, Property, Query
from verifiable_relu.spec.specfile import vnnlib_text
from verifiable_relu.train.export import quantize
from verifiable_relu.trust.certificate_file import write_unsat
from verifiable_relu.verifiers.auto import recording
from verifiable_relu.verifiers.base import Verdict
from verifiable_relu.verifiers.registry import make

METHODS = ("crown", "alpha-crown", "split", "bab", "auto")

UNDECIDED = ("at least, only", "is not proven, only", "are proven to reach", "is above the upper one")
"""What the project's checker says where it has bounded an inequality and found it wanting."""


@dataclass(frozen=True)
class Given:
    """A certificate, and what both checkers say of its records when they are changed."""

    name: str
    case: Case
    other: bytes | None
    verdict: Callable[[Records], str]

    def theirs(self, changed: Records) -> str | None:
        try:
            self.verdict(changed)
        except (Refused, BadInput) as error:
            return str(error)
        return None

    def ours(self, changed: Records) -> str | None:
        try:
            page_checker.check(written(changed), self.case.network, self.case.prop, self.other)
        except page_checker.Refused as error:
            return str(error)
        return None


def single(folder: Path, name: str, case: Case) -> Given:
    return Given(name, case, None, lambda changed: checked(folder, case, written(changed)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


def by_methods(folder: Path, count: int) -> Iterator[Given]:
    """What each method writes of random queries that hold, by a little."""
    queries = (random_query(seed, leaky=seed % 2 == 0, dyadic=True) for seed in itertools.count())
    holding = (query for query, gap in queries if gap > 0)
    for number, query in enumerate(itertools.islice(holding, count)):
        method = METHODS[number % len(METHODS)]
        data, text = write_onnx(query.network), vnnlib_text(query.property).encode()
        asked = Query(read_onnx(data), query.property)
        outcomes = claims(recording(make(method)), [asked], 20.0)
        if outcomes[0].verdict is Verdict.UNSAT:
            write_unsat(folder / "made", data, text, list(proofs([asked], outcomes, 20.0)))
            yield single(folder, method, Case(data, text, forged_dense.records(folder / "made")))


@pytest.fixture(scope="module")
def drawn(folder: Path) -> list[Given]:
    """Certificates of piecewise-linear networks of all kinds that both checkers know."""
    found = []
    for seed in range(draws(96)):
        dense = forged_dense.drawn(seed)
        reached = forged_dense.reached(dense, dense.polytopes)
        if not reached and (proof := forged_dense.certificate(folder, dense, seed)) is not None:
            case = Case(forged_dense.network(dense), forged_dense.prop(dense), proof)
            found.append(single(folder, "dense", case))
        kind = ("maxpool", "conv", "residual")[seed % 3]
        net = forged_networks.drawn(kind, seed)
        if net.scales == forged_networks.Scales():
            made = certificate(folder, net, forged_networks.Referee(net), seed)
            if made is not None:
                found.append(single(folder, kind, Case(net.plain, (folder / "p.vnnlib").read_bytes(), made[0])))
    return found


def running(folder: Path, arithmetic: str, name: str) -> Given:
    """A certificate about an arithmetic."""
    for seed in range(20):
        data = arithmetics.of(name, np.random.default_rng(seed), arithmetic)
        try:
            case = arithmetics.made(folder, data, arithmetic)
            checked(folder, case, written(case.records))
        except (BadInput, InputError, Refused) as error:
            # Some of their numbers are large.
            assert "overflow" in str(error) or "finite" in str(error), error
            continue
        return single(folder, f"{arithmetic} {name}", case)
    raise AssertionError(f"no certificate of {name} in {arithmetic}")


def paired(folder: Path, seed: int, smooth: bool, family: float, share: float) -> Given:
    """A certificate of how far the outputs of two networks differ."""
    folder.mkdir()
    networks, box = pairs.pair(seed, smooth, share), ball(np.random.default_rng(seed).normal(size=3), 0.25)
    one = hardened(networks[0], family) if family else networks[0]
    most = Fraction(round(pairs.proven((one, networks[1]), box) * 1.001 * 2**20) + 1, 2**20)
    files = pairs.made(folder, networks, box, most, family)
    case = Case((folder / "a.onnx").read_bytes(), (folder / "p.vnnlib").read_bytes(), files.records)
    return Given(f"pair {smooth} {family} {share}", case, (folder / "b.onnx").read_bytes(), files.checked)


def asked(folder: Path, name: str, data: bytes, prop: bytes, *options: str) -> Given:
    """The certificate that the command writes of a file and a property."""
    folder.mkdir()
    for file, content in (("a.onnx", data), ("p.vnnlib", prop)):
        (folder / file).write_bytes(content)
    files = ("--spec", folder / "p.vnnlib", "--net", folder / "a.onnx", "--certificates", folder / "c")
    done = run(["-m", "verifiable_relu", "certify", *files, *options])
    assert not done.returncode, done.stderr
    (path,) = (folder / "c").glob("*.jsonl.gz")
    return single(folder, name, Case(data, prop, records(path)))


def running_family(folder: Path, arithmetic: str, name: str, lam: str) -> Given:
    """A certificate about a family and an arithmetic, of a row that holds with room."""
    case = running(folder, arithmetic, name).case
    most = Fraction(case.records[1]["part"]["polytopes"][0][0]["most"])
    case = moved(case, Fraction(round((most - 2) * 64), 64))
    options = ("--joint", lam, "--arithmetic", arithmetic)
    return asked(folder / f"joint {name}", f"joint {arithmetic} {name}", case.network, case.prop, *options)


def running_quantised(folder: Path, arithmetic: str, name: str) -> Given:
    """A certificate about an int8 file in an arithmetic."""
    data, points = QUANTISED[name](), quantised.drawn(name, 1, 30, 0.1)
    low, high = points.min(0), points.max(0)
    bottom, top = quantised.enclosed(data, low, high, arithmetic)
    most = -Fraction(round(float(2 * top[0] - bottom[0]) * 64) + 1, 64)
    prop = Property(Box(low.astype(float), high.astype(float)), ((row({0: -1.0}, most),),))
    text = arithmetics.text_of(prop, data)
    return asked(folder / f"int8 {name}", f"int8 {arithmetic} {name}", data, text, "--arithmetic", arithmetic)


def added(g: Graph) -> str:
    """A sum of dequantised numbers, computed ones and stored ones, that is quantised behind a ReLU."""
    x = g.both("x", g.scale(about=0.1), u8(128))
    w = g("DequantizeLinear", g.whole(np.int8, 6, 5), g.scale())
    h = g.both(g("MatMul", x, w), g.scale(about=0.1), u8(0))
    bias = g("DequantizeLinear", g.whole(np.int32, 5, most=1000), np.float32([1e-3, 2e-3, 1e-3, 3e-3, 1e-3]), axis=0)
    k = g.both(g("Sub", h, bias), g.scale(about=0.1), np.array(3, np.int16))
    total = g("Relu", g("Add", h, k))
    return g.both(total, g.scale(about=0.2), u8(7))


def _added() -> bytes:
    g = Graph(21, 5)
    return g.file(added(g), (1, 6))


QUANTISED = {**{name: partial(quantised.of, name) for name in quantised.CASES}, "added": _added}


def whole(folder: Path, model: nn.Module, shape: tuple[int, ...], arithmetic: str, lam: float) -> Given:
    """A certificate of the whole way: a family, its file in an arithmetic, and the int8 file in it."""
    folder.mkdir()
    rng, files = np.random.default_rng(1), (folder / "a.onnx", folder / "b.onnx")
    files[0].write_bytes(write_onnx(from_torch(model, shape)))
    files[1].write_bytes(quantize(files[0].read_bytes(), rng.random((60, *shape)).astype(np.float32)))
    images = rng.random((2, *shape)).astype(np.float32)
    labels = read_onnx(files[0])(torch.tensor(images)).argmax(1)
    options = {"joint": lam, "arithmetic": arithmetic, "also": files[1], "certificates": folder}
    answers = verify(files[0], images, labels, 0.001, **options)  # type: ignore[arg-type]
    path = next(Path(r.certificate) for r in answers if r.answer == "unsat")
    prop = path.with_name(path.name.removesuffix(".jsonl.gz") + ".vnnlib")

    def verdict(changed: Records) -> str:
        (folder / "c").write_bytes(written(changed))
        return check(folder / "c", files[0], prop, None, files[1])

    case = Case(files[0].read_bytes(), prop.read_bytes(), records(path))
    return Given(f"whole way {arithmetic} {lam}", case, files[1].read_bytes(), verdict)


def models() -> list[tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    normal = nn.BatchNorm2d(2)
    conv = nn.Sequential(nn.Conv2d(1, 2, 2), normal, nn.ReLU(), nn.Flatten(), nn.Linear(8, 2)).eval()
    return [(dense, (4,)), (conv, (1, 3, 3))]


PAIRS = [(False, 0.0, 0.01), (False, 0.0, 1.0), (True, 0.0, 0.01), (True, 8.0, 0.01), (False, 20.0, 0.01)]
FAMILIES = [("float32", "planted", "160"), ("tf32", "residual", "3")]
WRITTEN = ("Sign", "means over windows", "transposed convolutions")
NETWORKS = ("near", "planted", "convolved", "residual", "pooled", "Sigmoid", "Tanh", "Gelu")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[Given]:
    folder, known = tmp_path_factory.mktemp("kinds"), list(page_network.ARITHMETICS)
    found = []
    for number, name in enumerate(NETWORKS):
        found += [running(folder, known[(number + by) % 4], name) for by in (0, 1 + number // 4)]
    found += [running(folder, arithmetic, "averaged") for arithmetic in known[:2]]
    found += [asked(folder / kind.replace(" ", "_"), kind, *question(kind)[1:]) for kind in WRITTEN]
    found += [paired(folder / str(n), n, *kind) for n, kind in enumerate(PAIRS)]
    for method in ("crown", "alpha-crown", "split"):
        found += [single(folder, f"int8 {name}", quantised.proved(folder, name, method)[0]) for name in quantised.CASES]
    for made in (curves.proven, curves.branched):
        found += [single(folder, kind, made(folder, kind)[3]) for kind in curves.KINDS]
    found += [running_family(folder, *asking) for asking in FAMILIES]
    found += [running_quantised(folder, known[number % 2], name) for number, name in enumerate(QUANTISED)]
    for number, (model, shape) in enumerate(models()):
        found.append(whole(folder / f"whole {number}", model, shape, known[number], (160.0, 30.0)[number]))
    return found


def accepted_by_both(given: list[Given]) -> None:
    for one in given:
        assert one.theirs(one.case.records) is None, one.name
        assert one.ours(one.case.records) is None, one.name


def test_every_method_s_certificates_are_accepted_by_the_page_alone(folder: Path) -> None:
    found = list(by_methods(folder, draws(20)))
    accepted_by_both(found)
    assert {one.name for one in found} == set(METHODS)


def test_certificates_of_each_kind_are_accepted_by_the_page_alone(
    folder: Path, drawn: list[Given], given: list[Given]
) -> None:
    """Trees, tighter bounds, planes, zonotopes of halves, MaxPool, convolutions, residual networks, and all others."""
    every = [make(folder, kind) for make in (tree_case, refined_case, cover_case) for kind in ("mlp", "leaky")]
    every += [planes_case(folder, 4), tree_case(folder, "residual")]
    said = {key for case in every for record in case.records for key in record}
    assert {"tree", "tighter", "plane", "zonotope", "halve", "split", "leaf"} <= said
    assert {one.name for one in drawn} == {"dense", "maxpool", "conv", "residual"}
    accepted_by_both([*(single(folder, "made", case) for case in every), *drawn, *given])


def changed_head(rng: random.Random, records: Records) -> Records:
    """A certificate whose claim is another, as its first record or its polytopes have it."""
    found = copy.deepcopy(records)
    first = found[0]
    match rng.choice(["arithmetic", "joint", "beside", "other", "alone", "most", "less", "digest"]):
        case "digest":
            first[rng.choice(["network", "property"])] = "0" * 64
        case "arithmetic":
            first["arithmetic"] = rng.choice([*page_network.ARITHMETICS, "real", "float64", None, ["float32"]])
        case "joint":
            length = len(first.get("joint", "x"))
            first["joint"] = rng.choice([["1"], ["1"] * length, ["160"] * 2, ["3", "1/2"], ["7"] * length])
        case "beside" if "beside" in first:
            first["beside"] = rng.choice([[], [[0, 0]], [[0, 1], [1, 0]], [[0, 0], [1, 1], [0, 1]], [[0, 0], [5, 1]]])
        case "other" if "other" in first:
            first["network"], first["other"] = first["other"], first["network"]
        case "alone":
            for record in found:
                if "alone" in record:
                    record["alone"] = [j for j in range(7) if rng.random() < 0.5]
        case "most":
            more = rng.choice([Fraction(1, 1000), Fraction(1, 10), 1])
            for record in found:
                for row in (row for rows in record.get("part", {}).get("polytopes", ()) for row in rows):
                    row["most"] = str(Fraction(row["most"]) + more)
        case "less":
            first.pop(rng.choice(["arithmetic", "joint", "beside", "other"]), None)
    return found


def compare(given: list[Given], times: int, change: Callable[[random.Random, Given], Records]) -> Counter[str]:
    """Ask both checkers about changed certificates; what one alone accepts is an inequality that rounding hides."""
    ended: Counter[str] = Counter()
    for number, one in enumerate(given):
        rng = random.Random(number)
        for _ in range(times):
            changed = change(rng, one)
            mine, other = one.ours(changed), one.theirs(changed)
            ended["accepted" if mine is None else "refused"] += 1
            if (mine is None) != (other is None):
                undecided = mine is None and any(text in (other or "") for text in UNDECIDED)
                assert undecided, f"{one.name}: the page {mine}, the checker {other}"
                ended["undecided"] += 1
    return ended


def test_both_accept_the_same_of_changed_certificates(drawn: list[Given]) -> None:
    def change(rng: random.Random, one: Given) -> Records:
        changed = forged(rng, one.case.records)
        changed[0]["property"] = hashlib.sha256(one.case.prop).hexdigest()
        return changed

    ended = compare(drawn, 10, change)
    assert ended["accepted"] > draws(10) and ended["refused"] > draws(100), ended
    assert ended["undecided"] < 0.02 * ended.total(), ended


def test_both_accept_the_same_of_changed_certificates_of_other_kinds(given: list[Given]) -> None:
    ended = compare(
        given, draws(24), lambda rng, one: (forged if rng.random() < 0.6 else changed_head)(rng, one.case.records)
    )
    assert ended["accepted"] > draws(100) and ended["refused"] > draws(400), ended
    assert ended["undecided"] < 0.03 * ended.total(), ended


def test_points_are_judged_by_both(folder: Path) -> None:
    ended: Counter[bool] = Counter()
    for seed in range(draws(30)):
        case = forged_dense.drawn(seed)
        net, text = forged_dense.network(case), forged_dense.prop(case)
        rng = random.Random(seed)
        point = [rng.choice([a, b, (a + b) / 3 + a / 3]) for a, b in zip(case.lower, case.upper, strict=True)]
        one = single(folder, "point", Case(net, text, one_point(net, text, point)))
        mine, other = one.ours(one.case.records), one.theirs(one.case.records)
        assert (mine is None) == (other is None), (seed, mine, other)
        ended[mine is None] += 1
    assert ended[True] and ended[False], ended


def test_the_page_s_checker_reads_networks_as_they_are_defined() -> None:
    """Values at random points are those of the rational evaluator of ONNX files."""
    for seed in range(draws(30)):
        net = forged_networks.drawn(("maxpool", "conv", "residual")[seed % 3], seed)
        rng = random.Random(seed)
        read, model = page_checker.read_network(net.plain), onnx.load_from_string(net.plain)
        atoms = [Fraction(rng.randint(-20, 20), 8) for _ in net.lower]
        x = np.empty((1, len(atoms)), object)
        x[0, :] = atoms
        for z, s in zip(read.z, read.s, strict=True):
            value = page_checker.at(z, atoms)
            atoms.append(value if value >= 0 else s * value)
        expected = onnx_exact.exact(model, {"x": x})["y"].ravel()
        assert [page_checker.at(form, atoms) for form in read.outputs] == [Fraction(v) for v in expected]


def test_a_gelu_that_runs_is_no_member_of_a_harder_family(tmp_path: Path) -> None:
    """From λ = 160 on z·Φ(λ·z) is above −0.01 for z around −1, where the file's GELU is −0.16."""
    data = arithmetics.smooth(np.random.default_rng(0), "Gelu")
    case = arithmetics.made(tmp_path, data, "float32")
    for lam, refused in (("160", True), ("1", False)):
        head = case.records[0] | {"joint": [lam]}
        said = single(tmp_path, "Gelu", case).ours([head, *case.records[1:]])
        assert (said is not None and "no member" in said) == refused


def moved(case: Case, most: Fraction) -> Case:
    """The same certificate, of the same row with another right side."""
    found = copy.deepcopy(case.records)
    ((row,),) = found[1]["part"]["polytopes"]
    ((output, coefficient),) = row["y"]
    row["most"] = str(most)
    asked = f"(assert (<= (* {decimal(Fraction(coefficient))} Y_{output}) {decimal(most)}))"
    kept = [line for line in case.prop.decode().splitlines() if "assert" not in line or "Y_" not in line]
    prop = "\n".join([*kept, asked]).encode()
    found[0]["property"] = hashlib.sha256(prop).hexdigest()
    return Case(case.network, prop, found)


def proved(case: Case) -> Fraction:
    """The largest right side that the page's checker accepts, up to 2⁻³⁶ of the numbers that it is found between."""
    most = Fraction(case.records[1]["part"]["polytopes"][0][0]["most"])
    low, size = Fraction(int(most * 2**40) - 1, 2**40), Fraction(1, 2**40)

    def holds(value: Fraction) -> bool:
        new = moved(case, value)
        try:
            page_checker.check(written(new.records), new.network, new.prop)
        except page_checker.Refused:
            return False
        return True

    while holds(low + size):
        size *= 4
    high = low + size
    for _ in range(36):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@pytest.mark.combined
@pytest.mark.parametrize("arithmetic", page_network.ARITHMETICS)
@pytest.mark.parametrize("name", ["near", "planted", "convolved", "residual", "pooled", "Gelu"])
def test_both_charge_the_same_for_rounding(
    name: str, arithmetic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the page's checker just proves a row, the project's needs 1 % of the rounding more, of GELU 10 %."""
    case = running(tmp_path, arithmetic, name).case
    rounded = proved(case)
    small = {key: Fraction(0) for key in ("operand", "step", "result", "least")}
    exact = page_network.Arithmetic(**small, largest=Fraction(2) ** 90, digits=200, lowest=-126)
    with monkeypatch.context() as patch:
        patch.setitem(page_network.ARITHMETICS, arithmetic, exact)
        charge = proved(case) - rounded
    assert charge > 0
    for share, accepted in ((Fraction(1, 10 if name == "Gelu" else 100), True), (Fraction(-1, 100), False)):
        new = moved(case, Fraction(int((rounded - share * charge) * 2**80), 2**80))
        said = single(tmp_path, name, new).theirs(new.records)
        assert (said is None) == accepted, said


@pytest.mark.parametrize("wrong", ["chord", "interval", "fixed", "sizes", "part", "gap", "Round"])
def test_faults_of_a_checker_show(
    drawn: list[Given], given: list[Given], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison notices a checker that takes the page's words otherwise."""
    bounds, chord = page_checker.Bounds, page_checker.Bounds.chord
    faults: dict[str, tuple[object, str, object]] = {
        "chord": (bounds, wrong, lambda self, k: chord(self, k) / 2),
        "interval": (bounds, wrong, lambda self, form: form.constant),
        "fixed": (bounds, wrong, lambda self, k: Fraction(1)),
        "sizes": (page_network.Arithmetic, wrong, lambda *_, **__: (Fraction(1, 8), Fraction(0))),
        "part": (bounds, wrong, lambda *_: None),
        "gap": (page_checker, wrong, lambda *_: Fraction(1)),
        "Round": (page_network.Round, "term", lambda *_: Fraction(-(10**6))),
    }
    monkeypatch.setattr(*faults[wrong])
    with pytest.raises(AssertionError):
        if wrong in ("chord", "interval", "fixed"):
            test_both_accept_the_same_of_changed_certificates(drawn)
        else:
            accepted_by_both(given)
