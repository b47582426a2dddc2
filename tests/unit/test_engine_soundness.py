"""Bounds of the relaxation engine against exact values; ``soundness/faults.py`` has faults that these tests see."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from verifiable_relu.bounds import backward, patches, rows, steps
from verifiable_relu.bounds.alpha import Ascent, ascend, search_slopes
from verifiable_relu.bounds.backward import Relaxation, Slopes
from verifiable_relu.bounds.linear_bounds import bound_by_crown, lower_of_rows
from verifiable_relu.ir.functions.piecewise_linear import PiecewiseLinear
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Convolution, Dense, Diagonal, Gather, LinearMap, Sparse
from verifiable_relu.ir.network import Affine, Elementwise, Input, Maximum, Network, Op, Product, Source, Sum

NARROW, WIDE = torch.float32, torch.float64


class Build:
    """A network, op by op; each method returns the number of the op that it adds."""

    def __init__(self, inputs: int, seed: int, dtype: torch.dtype = NARROW) -> None:
        self.ops: list[Op] = [Input(name="x", size=inputs)]
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * (2 * torch.rand(*shape, generator=self._generator, dtype=WIDE) - 1)).to(self._dtype)

    def put(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def map(self, source: int, of: LinearMap, bias: Tensor | None = None, **more: object) -> int:
        name = f"a{len(self.ops)}"
        return self.put(Affine(name=name, inputs=(source,), size=of.n_out, map=of, bias=bias, **more))  # type: ignore[arg-type]

    def dense(self, source: int, size: int, bias: float = 1.0) -> int:
        n_in = self.ops[source].size
        return self.map(source, Dense(self.random(size, n_in)), self.random(size, scale=bias))

    def conv(self, source: int, image: tuple[int, int, int], out: int, kernel: int, **options: object) -> int:
        groups = int(options.get("groups", 1))  # type: ignore[call-overload]
        of = Convolution(self.random(out, image[0] // groups, kernel, kernel), image, **options)  # type: ignore[arg-type]
        return self.map(source, of, self.random(of.n_out))

    def function(self, source: int, *below: float) -> int:
        slope = torch.tensor(below if len(below) > 1 else (*below, 0.0)[0], dtype=WIDE)
        size = self.ops[source].size
        return self.put(
            Elementwise(name=f"f{len(self.ops)}", inputs=(source,), size=size, function=PiecewiseLinear(slope))
        )

    def sum(self, *sources: int) -> int:
        return self.put(Sum(name=f"s{len(self.ops)}", inputs=sources, size=self.ops[sources[0]].size))

    def done(self) -> Network:
        shape = (self.ops[0].size,), (self.ops[-1].size,)
        return Network(tuple(self.ops), Source(*shape))


def dense_network(dtype: torch.dtype) -> Network:
    b = Build(3, 1, dtype)
    z = b.function(b.dense(0, 6))
    z = b.function(b.dense(z, 5), -0.25, 0.1, 1.5, 0.0, 2.0)
    b.dense(z, 2)
    return b.done()


def linear_network(dtype: torch.dtype) -> Network:
    """Without a nonlinear op that is not stable: bounds are what rounding leaves of them."""
    b = Build(3, 2, dtype)
    z = b.map(0, Diagonal(b.random(3)), b.random(3))
    z = b.dense(b.dense(z, 70, bias=2.0**12), 5, bias=2.0**20)
    b.dense(b.function(b.map(z, Dense(torch.eye(5)), torch.full((5,), 2.0**30)), 0.0), 3)
    return b.done()


def cancelling_network(dtype: torch.dtype) -> Network:
    """Two parts that nearly cancel: what an error does to each of them is large next to their sum."""
    b = Build(3, 3, dtype)
    z = b.dense(0, 6)
    weight = b.random(4, 6, scale=2.0**12)
    first, second = b.map(z, Dense(weight)), b.map(z, Dense((-weight.double() * (1 + 2.0**-20)).to(dtype)))
    b.dense(b.function(b.sum(first, second), 0.0), 2)
    return b.done()


def convolutional_network(dtype: torch.dtype) -> Network:
    b = Build(25, 4, dtype)
    x = b.map(0, Diagonal(b.random(25)), b.random(25))
    z = b.function(b.conv(x, (1, 5, 5), 4, 3, padding=(1, 1, 1, 1)))
    main = b.function(b.conv(z, (4, 5, 5), 4, 3, stride=(2, 2), padding=(1, 0, 1, 2)))
    size = (4, 3, 3)
    main = b.conv(main, size, 4, 3, padding=(1, 1, 1, 1), groups=2)
    main = b.map(main, Diagonal(b.random(36)), b.random(36))
    skip = b.conv(z, (4, 5, 5), 4, 1, stride=(2, 2))
    z = b.function(b.sum(main, skip), 0.125)
    z = b.function(b.conv(z, size, 2, 2, dilation=(2, 2)))
    b.dense(z, 2)
    return b.done()


def strided_network(dtype: torch.dtype) -> Network:
    """Kernels that are multiples of their strides, behind a layer that makes rows whole images."""
    b = Build(36, 5, dtype)
    z = b.function(b.conv(0, (1, 6, 6), 3, 2, stride=(2, 2)))
    z = b.function(b.conv(z, (3, 3, 3), 4, 2, stride=(2, 2), padding=(1, 1, 0, 0)))
    b.dense(b.function(b.dense(z, 5)), 2)
    return b.done()


def product_network(dtype: torch.dtype) -> Network:
    b = Build(3, 6, dtype)
    z = b.dense(0, 4)
    first = b.map(z, Gather(torch.tensor([0, 1, 2, 3, 0, -1]), 4))
    second = b.map(b.function(b.dense(0, 4), 0.5), Gather(torch.tensor([1, 2, 3, 0, 0, 2]), 4))
    y = b.put(Product(name="p", inputs=(first, second), size=6))
    index = torch.tensor([[0, 1, 2], [3, 4, 5], [0, 5, 0]])
    z = b.map(y, Sparse(index, torch.tensor([[1.0, 1.0, 1.0], [1.0, -2.0, 1.0], [1.0, 1.0, 0.0]]), 6), b.random(3))
    b.dense(b.function(z), 2)
    return b.done()


def maximum_network(dtype: torch.dtype) -> Network:
    b = Build(3, 7, dtype)
    z = b.dense(0, 6)
    candidates = torch.tensor([[0, 1, 4, 5], [1, 2, 5, 3], [2, 3, 4, 4], [2, 1, 4, 2]])[:3].T.contiguous()
    repeated = torch.cat([candidates, candidates[:1]])
    y = b.put(Maximum(name="m", inputs=(z,), size=3, candidates=repeated))
    b.dense(b.function(b.dense(y, 3)), 2)
    return b.done()


NETWORKS: dict[str, Callable[[torch.dtype], Network]] = {
    "dense": dense_network,
    "linear": linear_network,
    "cancelling": cancelling_network,
    "convolutional": convolutional_network,
    "strided": strided_network,
    "product": product_network,
    "maximum": maximum_network,
}


def exact_values(network: Network, x: list[Fraction]) -> list[list[Fraction]]:
    """Every op's value, from the entries of maps and nothing else of them."""
    values = [x]
    for op in network.ops[1:]:
        inputs = [values[i] for i in op.inputs]
        match op:
            case Affine():
                bias = [0.0] * op.size if op.bias is None else op.bias.tolist()
                found = [Fraction(value) for value in bias]
                for row, column, weight in zip(*(part.tolist() for part in op.map.entries()), strict=True):
                    found[row] += Fraction(weight) * inputs[0][column]
            case Sum():
                found = [sum(parts, Fraction(0)) for parts in zip(*inputs, strict=True)]
            case Product():
                found = [first * second for first, second in zip(*inputs, strict=True)]
            case Maximum():
                found = [max(inputs[0][i] for i in each) for each in op.candidates.T.tolist()]
            case Elementwise():
                assert isinstance(op.function, PiecewiseLinear)
                slopes = op.function.slope_below.double().expand(op.size).tolist()
                found = [
                    max(z, Fraction(0)) + Fraction(s) * min(z, Fraction(0))
                    for z, s in zip(inputs[0], slopes, strict=True)
                ]
        values.append(found)
    return values


def product_of(row: list[float], values: list[Fraction]) -> Fraction:
    return sum((Fraction(a) * v for a, v in zip(row, values, strict=True) if a), Fraction(0))


@dataclass
class Case:
    """Boxes of a network, points in each, and what a relaxation of them is asked."""

    network: Network
    box: Interval
    points: list[list[list[list[Fraction]]]]
    dtype: torch.dtype

    @staticmethod
    def make(name: str, weights: torch.dtype, dtype: torch.dtype, width: float, batch: int) -> Case:
        network = NETWORKS[name](weights)
        generator = torch.Generator().manual_seed(11)
        size = network.input_size
        center = 2 * torch.rand(batch, size, generator=generator, dtype=WIDE) - 1
        center = center * torch.tensor([1.0, 0.25, 3.0], dtype=WIDE)[:batch, None]
        varying = torch.arange(0, size, max(1, size // 3))[:3]
        lower, upper = center.clone(), center.clone()
        upper[:, varying] += width * torch.tensor([1.0, 0.5, 2.0], dtype=WIDE)[: len(varying)]
        points = []
        for low, high in zip(lower.tolist(), upper.tolist(), strict=True):
            corners = []
            for ends in itertools.product((0, 1), repeat=len(varying)):
                x = [Fraction(value) for value in low]
                for i, end in zip(varying.tolist(), ends, strict=True):
                    x[i] = Fraction(high[i] if end else low[i])
                corners.append(x)
            middle = [(Fraction(a) + Fraction(b)) / 2 for a, b in zip(low, high, strict=True)]
            points.append([exact_values(network, x) for x in (*corners[:: 3 if width else 8], middle)])
        return Case(network, Interval(lower, upper), points, dtype)

    def violations(self, index: int, matrix: Tensor, lower: Tensor) -> Iterator[str]:
        """Rows of op ``index``, (batch, each, n), whose lower bounds (batch, each) are above an exact value."""
        for sample, values in enumerate(self.points):
            for row, bound in zip(matrix[sample].tolist(), lower[sample].tolist(), strict=True):
                for value in values:
                    exact = product_of(row, value[index])
                    if bound > exact:
                        yield f"op {index}: {bound} is above {float(exact)} by {float(Fraction(bound) - exact)}"

    def intervals(self, relaxation: Relaxation) -> Iterator[str]:
        for index, bounds in enumerate(relaxation.bounds):
            ends = bounds.interval.lower.tolist(), bounds.interval.upper.tolist()
            points, radii = bounds.point.tolist(), bounds.radius.tolist()
            for sample, values in enumerate(self.points):
                for value in values:
                    parts = zip(
                        ends[0][sample], value[index], ends[1][sample], points[sample], radii[sample], strict=True
                    )
                    for low, v, high, point, radius in parts:
                        if not low <= v <= high or abs(v - Fraction(point)) > radius:
                            yield f"interval of op {index}: {float(v)} is not in [{low}, {high}]"

    def check(self, thorough: bool = True) -> Iterator[str]:
        """What is wrong with the bounds of a relaxation, in every way in which they are made."""
        relaxation = bound_by_crown(Relaxation(self.network, self.box, dtype=self.dtype))
        yield from self.intervals(relaxation)
        generator, batch = torch.Generator().manual_seed(5), relaxation.batch

        def random(*shape: int) -> Tensor:
            return 2 * torch.rand(*shape, generator=generator, dtype=WIDE) - 1

        last, each = len(self.network.ops) - 1, 3
        matrix = random(batch, each, self.network.output_size)
        flat, sample = matrix.flatten(0, 1), torch.arange(batch).repeat_interleave(each)
        for until in (0, last - 1):
            order = torch.randperm(len(flat), generator=generator)
            found, _ = lower_of_rows(relaxation, flat[order], sample[order], until=until)
            yield from self.violations(
                last, matrix, torch.empty_like(found).index_copy(0, order, found).view(batch, each)
            )
        functions = [i for i, op in enumerate(self.network.ops) if isinstance(op, Elementwise)]
        products = [i for i, op in enumerate(self.network.ops) if isinstance(op, Product)]
        slopes = {i: Slopes(*(1.5 * random(batch, self.network.ops[i].size) for _ in range(2))) for i in functions}
        tilts = {i: random(batch, self.network.ops[i].size) for i in products}
        own = relaxation.lower(last, matrix, slopes=slopes, tilts=tilts, coefficients=True)
        yield from self.violations(last, matrix, own.value)
        yield from self.coefficients(relaxation, matrix, own.value, own.coefficients)
        if thorough:
            ascent = Ascent(steps=3)
            yield from self.violations(
                last, matrix, ascend(relaxation, last, flat, sample, ascent).lower.view(batch, each)
            )
            searched = Relaxation(self.network, self.box, dtype=self.dtype)
            yield from self.intervals(bound_by_crown(searched, search=search_slopes(ascent)))

    def steps(self) -> Iterator[str]:
        """Rows for which a single step does not keep the inequality (∗) of ``steps``."""
        relaxation = bound_by_crown(Relaxation(self.network, self.box, dtype=self.dtype))
        generator = torch.Generator().manual_seed(7)
        distances = [self._distances(relaxation, sample) for sample in range(relaxation.batch)]
        for index in range(relaxation.structure.start + 1, len(self.network.ops)):
            shape = (relaxation.batch, 3, self.network.ops[index].size)
            a = (2 * torch.rand(shape, generator=generator, dtype=WIDE) - 1).to(self.dtype)
            stepped = relaxation.step(index, self.dtype).back(rows.DenseRows(a), None)
            constant = [part.to(WIDE) for part in stepped.constants]
            constant += [] if stepped.charge is None else [-stepped.charge]
            given = [(source, of.dense().to(WIDE).tolist()) for source, of in stepped.given]
            for sample, row in itertools.product(range(shape[0]), range(shape[1])):
                total = sum((Fraction(float(part[sample, row])) for part in constant), Fraction(0))
                for at in distances[sample]:
                    after = sum((product_of(of[sample][row], at[source]) for source, of in given), total)
                    if after > product_of(a[sample, row].tolist(), at[index]):
                        yield f"the step through op {index} does not hold"

    def _distances(self, relaxation: Relaxation, sample: int) -> list[list[list[Fraction]]]:
        """v − v₀ of every op at every point of a sample."""
        points = [bounds.point[sample].tolist() for bounds in relaxation.bounds]
        return [
            [
                [v - Fraction(p) for v, p in zip(op, point, strict=True)]
                for op, point in zip(values, points, strict=True)
            ]
            for values in self.points[sample]
        ]

    def coefficients(self, relaxation: Relaxation, matrix: Tensor, lower: Tensor, a: Tensor | None) -> Iterator[str]:
        """Points at which lower + |A|·radius + A·(v − v₀) is above the row's value."""
        assert a is not None
        start = relaxation.structure.start
        known = relaxation.bounds[start]
        for sample, values in enumerate(self.points):
            center, radius = known.point[sample].tolist(), known.radius[sample].tolist()
            for row, bound, reached in zip(
                matrix[sample].tolist(), lower[sample].tolist(), a[sample].tolist(), strict=True
            ):
                for value in values:
                    parts = zip(reached, value[start], center, radius, strict=True)
                    line = sum(
                        (Fraction(c) * (v - Fraction(m)) + abs(Fraction(c)) * Fraction(r) for c, v, m, r in parts),
                        Fraction(0),
                    )
                    exact = product_of(row, value[-1])
                    if Fraction(bound) + line > exact:
                        yield "a linear bound does not hold"


def _in_small_parts(patch: pytest.MonkeyPatch) -> None:
    """Chunks of few rows, so that some hold one sample of several, and columns and images that are small."""
    patch.setattr(backward, "CHUNK_BYTES", 1 << 13)
    patch.setattr("verifiable_relu.bounds.structure.LEAVE_OUT", 1)


@pytest.fixture(autouse=True)
def _tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _in_small_parts(monkeypatch)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [WIDE, NARROW])
@pytest.mark.parametrize("name", NETWORKS)
def test_bounds_hold(name: str, dtype: torch.dtype) -> None:
    for width, batch in ((0.0, 3), (1e-4, 1), (1.0, 3)):
        assert next(Case.make(name, NARROW, dtype, width, batch).check(), None) is None


@pytest.mark.parametrize("dtype", [WIDE, NARROW])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_step_keeps_the_inequality(name: str, dtype: torch.dtype) -> None:
    for width, weights in ((1e-13, NARROW), (0.5, WIDE)):
        assert next(Case.make(name, weights, dtype, width, 2).steps(), None) is None


@pytest.mark.parametrize("name", NETWORKS)
def test_intervals_alone_hold(name: str) -> None:
    for width in (0.0, 1e-13, 1.0):
        case = Case.make(name, NARROW, WIDE, width, 3)
        assert next(case.intervals(Relaxation(case.network, case.box, dtype=NARROW).advance()), None) is None


def covered_sums() -> Iterator[str]:
    """Constants of linear bounds whose computed sum is above the exact one."""
    generator = torch.Generator().manual_seed(3)
    for dtype, count in itertools.product((NARROW, WIDE), (3, 64, 130)):
        a, floor, gap = (2 * torch.rand(40, count, generator=generator, dtype=WIDE) - 1 for _ in range(3))
        a, top = a.to(dtype), floor + gap.abs()
        low, rise = steps._covering(floor, top, rows.sum_terms(count, dtype), dtype)
        found = rows.summed(a.clamp(max=0).mul_(rise).addcmul_(a, low))
        for row, bound in enumerate(found.tolist()):
            ends = zip(a[row].tolist(), floor[row].tolist(), top[row].tolist(), strict=True)
            if bound > sum((Fraction(c) * Fraction(f if c > 0 else t) for c, f, t in ends), Fraction(0)):
                yield "a sum of constants"


def weighed_sums() -> Iterator[str]:
    """Sums |A|·radius that are below the exact ones."""
    generator = torch.Generator().manual_seed(4)
    for dtype, count in itertools.product((NARROW, WIDE), (3, 64, 130)):
        a, radius = (torch.rand(2, 20, count, generator=generator, dtype=WIDE).to(dtype) - 0.5 for _ in range(2))
        radius = radius[:, 0].abs()
        found = rows.DenseRows(a).weigh(rows.SampleVectors(radius), None)
        for group, row in itertools.product(range(2), range(20)):
            exact = product_of(a[group, row].abs().tolist(), [Fraction(r) for r in radius[group].tolist()])
            if float(found[group, row]) < exact:
                yield "a weighed sum"


def closed_sums() -> Iterator[str]:
    """Closed sums that are above the exact ones."""
    generator = torch.Generator().manual_seed(5)
    terms = [2.0**k * (torch.rand(1, 60, generator=generator, dtype=WIDE) - 0.5) for k in (3, 1, 0, -2, -4)]
    charges = [2.0**-30 * torch.rand(1, 60, generator=generator, dtype=WIDE)]
    found = rows.close(list(terms), charges, torch.zeros(1, 1, dtype=WIDE))
    for row, bound in enumerate(found[0].tolist()):
        exact = sum((Fraction(float(part[0, row])) for part in terms), -Fraction(float(charges[0][0, row])))
        if bound > exact:
            yield "a closed sum"


def single_neurons() -> Iterator[str]:
    """Neurons of a first layer whose weights no float32 number is, bounded by rows in float32."""
    b = Build(3, 8, WIDE)
    b.dense(b.function(b.dense(0, 40)), 2)
    network, lower = b.done(), torch.tensor([[0.5, -0.25, 1.0]], dtype=WIDE)
    relaxation = Relaxation(network, Interval(lower, lower + 2), dtype=NARROW).advance()
    neuron = torch.arange(40)[None]
    found = relaxation.lower_of_neurons(1, neuron, torch.ones(1, 40, dtype=WIDE), None)[0]
    corners = itertools.product(*([Fraction(x), Fraction(x + 2)] for x in lower[0].tolist()))
    values = [exact_values(network, list(corner))[1] for corner in corners]
    for i, bound in enumerate(found.tolist()):
        if bound > min(value[i] for value in values):
            yield "a neuron of the first layer"


def rows_in_patches() -> Iterator[str]:
    """Patches that, taken back through a convolution, are other rows than whole images are."""
    b = Build(1, 9, WIDE)
    for stride, padding, groups in ((1, (1, 1, 1, 1), 1), (2, (0, 1, 1, 0), 1), (1, (0, 0, 0, 0), 2)):
        weight = b.random(4, 4 // groups, 2, 2)
        conv = Convolution(weight, (4, 9, 9), stride=(stride, stride), padding=padding, groups=groups)
        grid = patches.PatchGrid(conv.out_shape[1:], (3, 3), (1, 1), (1, 1))
        point = torch.arange(math.prod(conv.out_shape[1:]))
        for dtype in (WIDE, NARROW):
            values = b.random(len(point), 2, 3, 3, 4).to(dtype)
            mine = patches.Patches(values, point, grid, conv.out_shape)
            expected = conv.transpose(mine.dense().flatten(0, 1)).unflatten(0, (len(point), 2))
            if not torch.allclose(mine.through(conv).dense(), expected, atol=1e-5):
                yield "rows in patches"


def steps_of_single_neurons() -> Iterator[str]:
    """Neurons as rows of a layer's inputs, of weights that float32 rounds: off by more than charged."""
    b = Build(3, 8, WIDE)
    b.dense(0, 40)
    image = Build(25, 9, WIDE)
    image.conv(0, (1, 5, 5), 2, 2)
    for network in (b.done(), image.done()):
        size, n_in = network.ops[1].size, network.input_size
        lower = torch.linspace(-1, 1, n_in, dtype=WIDE)[None]
        relaxation = Relaxation(network, Interval(lower, lower + 2), dtype=NARROW).advance()
        step = relaxation.step(1, NARROW)
        assert isinstance(step, steps.AffineStep)
        rows = step.neurons(torch.arange(size)[:, None], torch.ones(size, 1))
        assert rows is not None
        off = [[Fraction(-c) for c in row] for row in rows.dense().double()[:, 0].tolist()]
        for i, j, weight in zip(*(part.tolist() for part in network.ops[1].map.entries()), strict=True):  # type: ignore[attr-defined]
            off[i][j] += Fraction(weight)
        for row, charge in zip(off, step.alone[0].tolist(), strict=True):
            if sum(map(abs, row)) * Fraction(float(relaxation.bounds[0].radius.min())) > Fraction(charge):
                yield "the step of a single neuron"


SEAMS = [covered_sums, weighed_sums, closed_sums, single_neurons, steps_of_single_neurons, rows_in_patches]


@pytest.mark.parametrize("seam", SEAMS)
def test_a_seam_alone_holds(seam: Callable[[], Iterator[str]]) -> None:
    assert next(seam(), None) is None


def problems() -> Iterator[str]:
    """What these tests have against the library: with a seeded fault in it (``soundness/faults.py``), something."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        _in_small_parts(patch)
        for seam in SEAMS:
            yield from seam()
        for name, dtype, width in itertools.product(NETWORKS, (NARROW, WIDE), (1e-13, 0.5)):
            yield from Case.make(name, WIDE, dtype, width, 2).steps()
        for name, dtype, width in itertools.product(NETWORKS, (NARROW, WIDE), (1.0, 0.0)):
            yield from Case.make(name, NARROW, dtype, width, 3).check(thorough=False)
