"""The slack for float32 rounding in rows of coefficients: sufficient, and not much larger than needed."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from tests.support.float32_cases import SEEDS, Draw, box_of, exact, excluded, last_in_float32
from tests.support.summation import in_order
from verifiable_relu.bounds import TUNING, Bounds, Relaxation, Tuning, crown_relaxation, rounding, sums
from verifiable_relu.bounds.operators import ConvolutionOperator
from verifiable_relu.bounds.slack import LineStep, Slack
from verifiable_relu.network.build import Builder
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import LeakyRelu, Relu
from verifiable_relu.rounding import gamma, unit_roundoff


@pytest.mark.parametrize(("least", "units"), ((0.0, 4), (-1.0, 7)), ids=("relu", "any"))
def test_a_step_through_an_activation_errs_by_no_more_than_is_granted(least: float, units: int) -> None:
    """The error of a step, in units of |A|, is within the stated one, for slopes in [0, 1] and for any slopes."""
    generator, share = torch.Generator().manual_seed(0), 0.0
    near = torch.rand(4, 1 << 19, generator=generator, dtype=torch.float64)
    for width in (1, 1e-3):
        # Lines that differ by as much as they may, in the second round.
        (up, low), a = least + (1 - least) * width * near[:2], -1 - near[2:3].float()
        low, a = 1 + least - low, torch.where(near[3:] < 0.25, -a, a)
        none = torch.zeros_like(near[:1])
        before = LineStep(low[None], (up - low)[None], none, none).in_float32(4).back(a[None], TUNING)[0]
        off = (before - torch.where(a < 0, up, low) * a).abs() / a.abs()
        share = max(share, float(off.amax()) / (units * unit_roundoff(torch.float32)))
    assert 0.4 < share <= 1


def test_what_a_step_errs_by_is_granted_where_no_affine_map_comes_before() -> None:
    """The activation's input is another activation's output, or a sum with one."""
    checked = set()
    for seed in SEEDS:
        draw, build = Draw(seed), Builder((2, 4, 4))
        x = build.activation(build.conv2d(0, draw.weight(2, 2, 3, 3), draw(2), "in", padding=(1, 1, 1, 1)), Relu, "act")
        x = build.add(build.conv2d(x, draw.weight(2, 2, 1, 1), draw(2), "inner"), x, "sum")
        x = build.activation(x, Relu, "after a sum")
        x = build.activation(build.reshape(x, (4, 2, 4), "shaped"), Relu, "after a reshape")
        x = build.activation(x, Relu, "after an activation")
        flat = build.reshape(x, (32,), "flat")
        net = build.network(build.linear(flat, draw(2, 32), draw(2), "out"), name="bare")
        relaxation = crown_relaxation(net, box_of(draw, net))
        for index in range(relaxation.backward.float32.last_node + 1):
            if isinstance(net.nodes[index], Relu):
                source = net.nodes[index].inputs[0]
                radius, error = relaxation.nodes.radius(source).flatten(1), relaxation.backward.slack.error(source)
                assert bool((error >= 4 * unit_roundoff(torch.float32) * radius).all()), (seed, index)
                checked.add(net.nodes[source].op)
    assert checked == {"Conv2d", "Add", "Reshape", "Relu"}


def test_slopes_of_any_sign_are_granted_more_than_those_of_a_relu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slack is larger after the same map, and only for lines in float32."""
    steps, slope, full = {}, torch.tensor(-1.0).double(), rounding.backward_activation
    for most in (7, 4):
        if most == 4:
            # Without a radius there is no more for float32.
            monkeypatch.setattr(rounding, "backward_activation", lambda *given: full(*given[:5]))
        draw, build = Draw(0), Builder((2, 4, 4))
        x = build.conv2d(0, draw.weight(2, 2, 3, 3), draw(2), "in")
        x = build.reshape(build.activation(x, LeakyRelu, "act", slope=slope), (8,), "flat")
        x = build.activation(build.linear(x, draw(3, 8), draw(3), "more"), LeakyRelu, "last", slope=slope)
        net = build.network(build.linear(x, draw(2, 3), draw(2), "out"), name="signs")
        one = torch.ones(1, 2, 4, 4).double()
        relaxation = crown_relaxation(net, Bounds(-one, one))
        first, last = (i for i, node in enumerate(net.nodes) if isinstance(node, LeakyRelu))
        assert first <= relaxation.backward.float32.last_node < last
        steps[most] = [relaxation.backward.shifted.step(index, True) for index in (first, last)]
        radius, shared = relaxation.nodes.radius(1).flatten(1), relaxation.lines.of(first)
    (mine, last), (more, same) = steps[4], steps[7]
    assert mine.floor is not None and more.floor is not None
    steepest = torch.maximum(shared.lower_slope.abs(), shared.upper_slope.abs()).flatten(1)
    needed = 3 * unit_roundoff(torch.float32) * steepest * radius
    assert bool((mine.floor - more.floor >= needed).all()) and bool((more.lift - mine.lift >= 2 * needed).all())
    assert torch.equal(last.lift, same.lift)


@pytest.mark.parametrize("size", (1, 96, 97, 1009, 4096, 10007))
@pytest.mark.parametrize("kind", ("rows", "windows"))
def test_what_rounding_takes_away_is_not_lost_in_its_own_sum(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum |A|·error at an inner node is rounded safely, in cases where a bound consists of it alone."""
    draw, build, rows = Draw(size), Builder((1, 1, size)), 64
    a = torch.randn(rows, 1, 1, size, generator=draw.generator)
    middle = build.conv2d(0, torch.ones(1, 1, 1, 1).double(), None, "middle")
    if kind == "windows":
        last = build.conv2d(middle, a.double(), None, "last")
    else:
        flat = build.reshape(middle, (size,), "flat")
        last = build.linear(flat, a.flatten(1).double(), None, "last")
    net = build.network(last, name="wide")
    values = torch.rand(1, size, generator=draw.generator, dtype=torch.float64)
    granted = {middle: values, last: torch.zeros(1, rows).double()}
    monkeypatch.setattr(Slack, "error", lambda self, index, after=None, alone=False: granted[index])
    monkeypatch.setattr(Slack, "end", lambda self, terms=0: torch.zeros(1, size))
    monkeypatch.setattr(rounding, "total", lambda found, lost, constant=None: found)
    zero = torch.zeros(1, 1, 1, size).double()
    tuning = replace(TUNING, window_share=1.0)
    relaxation = Relaxation(net, Bounds(zero, zero), float32=True, tuning=tuning)
    assert relaxation.backward.float32.last_node == last
    neurons, one = torch.arange(rows), torch.tensor([0])
    if kind == "windows":
        found = -relaxation.neurons(last, neurons, torch.ones(rows).double(), one)
    else:
        found = -relaxation.lower(last, torch.eye(rows).double(), one)[0]
    exact = a.flatten(1).double().abs() @ values[0]
    few = sums.last_axes(a.flatten(1).abs() * values.float(), 1, TUNING)
    assert bool((found >= exact).all()) and bool((few.double() < exact).any())
    assert bool((found <= exact * (1 + 2e-5 * (1 + size / 96))).all())


@pytest.mark.parametrize("batch", (1, 3))
def test_bounds_fall_by_what_rows_lose_in_becoming_float32_numbers(batch: int) -> None:
    draw, build = Draw(batch), Builder((6,))
    x = build.activation(build.linear(0, draw.weight(20, 6), draw(20), "in"), Relu, "act")
    x = build.linear(x, draw.weight(9, 20), draw(9), "more")
    net = build.network(build.linear(x, draw.weight(2, 9), draw(2), "out"), name="dense")
    box = box_of(draw, net)
    center = box.lower[:batch]
    relaxation = crown_relaxation(net, Bounds(center - 1, center + 1), float32=True)
    assert relaxation.backward.float32.last_node > x
    gone = 0.49 * torch.finfo(torch.float32).eps
    rows = torch.eye(9).double().repeat(batch, 1)
    plain, changed = (relaxation.lower(x, rows * (1 + share))[0].unflatten(0, (batch, 9)) for share in (0.0, gone))
    # The same coefficients, but for their values at the point.
    point, radius = (of(x).flatten(1) for of in (relaxation.nodes.point, relaxation.nodes.radius))
    moved = gone * point - (changed - plain)
    assert bool((moved >= gone * radius - 1e-12 * (radius + point.abs())).all()) and bool((radius > 0).all())


@pytest.mark.parametrize("share", (0.0, 1e-6, 1.0))
@pytest.mark.parametrize("batch", (1, 5))
def test_errors_in_rows_of_the_first_dense_layer_go_with_its_reach_and_its_active_neurons(
    batch: int, share: float
) -> None:
    """The slack is proportional to |W|·|x − x̂| and to the number of products, that of possibly active neurons."""
    tuning = replace(TUNING, interval_products=1)
    draw, build = Draw(batch), Builder((300,))
    weight = draw.weight(40, 300)
    x = build.activation(build.linear(0, weight, draw(40) * weight.abs().sum(1), "in"), Relu, "act")
    net = build.network(build.linear(x, draw.weight(3, 40), draw(3), "out"), name="wide")
    center = torch.randn(batch, 300, generator=draw.generator, dtype=torch.float64)
    radius = share * torch.rand(batch, 300, generator=draw.generator, dtype=torch.float64)
    relaxation = crown_relaxation(net, Bounds(center - radius, center + radius), tuning=tuning)
    nodes, slack = relaxation.nodes, relaxation.backward.slack
    assert relaxation.backward.float32.last_node == nodes.start == 0
    operator = nodes.operators[1]
    apart = rounding.backward_affine(operator, nodes.size(0), slack.sums)
    active = nodes.possibly_active(2).sum(1, keepdim=True)
    for after, terms in ((2, active), (None, 40)):
        needed = operator.absolute(nodes.radius(0)) * gamma(1, torch.float32) * (terms + 4)
        found = slack.error(1, after) - apart
        assert bool((found >= needed).all()) and bool((found <= 1.02 * needed + 1e-2 * apart).all())


@pytest.mark.parametrize("kind", ("convolution", "linear"))
@pytest.mark.parametrize("batch", (1, 5))
def test_errors_in_rows_of_a_later_map_go_with_its_reach_by_intervals(batch: int, kind: str) -> None:
    """|W|·|x − x̂| is taken from intervals, before rows tighten the bounds of the two activations after the map."""
    draw, build = Draw(batch), Builder((2, 6, 6))
    x = build.activation(build.conv2d(0, draw.weight(4, 2, 3, 3), draw(4), "first"), Relu, "act")
    if kind == "convolution":
        y = build.conv2d(x, draw.weight(3, 4, 2, 2), draw(3), "second")
    else:
        y = build.linear(build.reshape(x, (64,), "flat"), draw.weight(9, 64), draw(9), "second")
    both = build.add(build.activation(y, Relu, "one"), build.activation(y, Relu, "other"), "both")
    net = build.network(both, name="two")
    center = torch.randn(batch, 2, 6, 6, generator=draw.generator, dtype=torch.float64)
    radius = 0.3 * torch.rand(batch, 2, 6, 6, generator=draw.generator, dtype=torch.float64)
    relaxation = crown_relaxation(net, Bounds(center - radius, center + radius), float32=True)
    assert relaxation.backward.float32.last_node >= x
    nodes, slack, operator = relaxation.nodes, relaxation.backward.slack, relaxation.nodes.operators[y]
    node = operator.node
    source = node.inputs[0]
    tightened, before = nodes.of(y), nodes.interval(y)
    assert bool((tightened.upper < before.upper - 1e-3 * (before.upper - before.lower)).any())
    fresh = Relaxation(net, Bounds(center - radius, center + radius), relaxation.pre)
    assert bool((fresh.bounds(y).upper <= before.upper).all())
    apart = rounding.backward_affine(operator, nodes.size(source), slack.sums)
    apart = apart.flatten(1)
    terms = operator.adjoint_terms if isinstance(operator, ConvolutionOperator) else node.size
    reach = operator.absolute(nodes.radius(source)).flatten(1)
    needed = reach * gamma(1, torch.float32) * (terms + 4)
    found = slack.error(y) - apart
    assert bool((found >= needed).all()) and bool((found <= 1.02 * needed + 1e-2 * apart).all())


def _disappearing(channels: int) -> Tensor:
    """Coefficients (1, channels, 64, 64), equal in all channels; all but the first are lost in float32 sums."""
    small, length = 0.99 * unit_roundoff(torch.float32), sums.lines(64 * 64, TUNING.sum_length)[1]
    a = torch.full((64 * 64,), small / length, dtype=torch.float64)
    a[:length] = small
    a[0] = 1
    return a.float().double().reshape(64, 64).expand(1, channels, 64, 64)


def _image(channels: int, relu: bool) -> Network:
    """An image in which every pixel counts, with alternating signs in each channel."""
    build = Builder((1, 64, 64))
    signs = torch.tensor([(-1.0) ** i for i in range(channels)], dtype=torch.float64)
    x = build.conv2d(0, signs.reshape(-1, 1, 1, 1), None, "conv")
    return build.network(build.activation(x, Relu, "act") if relu else x, name="image")


@pytest.mark.parametrize("place", ("concretise", "summed_single"))
def test_sums_in_float32_may_be_taken_in_any_order(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken one number after the other, with large first numbers beside which the others are lost.

    The summands are the radii of the input, and the distances of lower lines from the points in
    relu(x) + relu(−x) = |x|.
    """

    def summed(products: Tensor, axes: int, tuning: Tuning) -> Tensor:
        products = products.flatten(-axes)
        return in_order(in_order(products.unflatten(-1, sums.lines(products.shape[-1], tuning.sum_length))))

    monkeypatch.setattr(sums, "last_axes", summed)
    relu = place == "summed_single"
    net, a = _image(1 + relu, relu), (1 if relu else -1) * _disappearing(1 + relu)
    box = Bounds(-torch.ones(1, 1, 64, 64).double(), torch.ones(1, 1, 64, 64).double())
    last = len(net.nodes) - 1
    value = Fraction(0) if relu else sum((Fraction(c) for c in a[0, 0].flatten().tolist()), Fraction(0))

    def wrong() -> int:
        return excluded(crown_relaxation(net, box).lower(last, a, torch.tensor([0]))[0], [value])

    assert last_in_float32(net, box) == last and not wrong()
    monkeypatch.setattr(rounding, place, lambda *given: given[:2] if relu else given[0])
    assert wrong()


@pytest.mark.parametrize("above", (True, False), ids=("upper", "lower"))
def test_offsets_summed_in_float32_are_not_too_high(above: bool) -> None:
    """The sums A⁻·top and A·floor are rounded safely, although float32 sums lose all but the first products."""
    a = -_disappearing(1).flatten().float()
    ones, zeros = torch.ones(len(a), dtype=torch.float64), torch.zeros(len(a), dtype=torch.float64)
    top, floor = (ones, zeros) if above else (zeros, ones)
    value, lines = sum((Fraction(c) for c in a.tolist()), Fraction(0)), sums.lines(len(a), TUNING.sum_length)

    def excess(top: Tensor, floor: Tensor) -> Fraction:
        products = a * top.float() + a * floor.float()
        return Fraction(float(in_order(in_order(products.unflatten(0, lines))))) - value

    assert excess(top, floor) > 0
    outward = rounding.summed_single(top, floor, sums.depth(len(a), TUNING))
    assert -1e-2 < excess(*outward) <= 0


@pytest.mark.parametrize("first", (1.0, -1.0))
def test_the_sum_of_many_rows_in_float32_is_not_too_high(first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows below the sum's resolution are added to a first row, which a last row nearly cancels."""
    build, uses = Builder((1, 1, 1)), 100
    weight = torch.full((uses, 1, 1, 1, 1), 0.99 * unit_roundoff(torch.float32), dtype=torch.float64)
    # Rows come in the opposite order.
    weight[0], weight[-1] = first, 1
    parts = [build.conv2d(0, w, None, f"part{i}") for i, w in enumerate(weight.float().double())]
    x = parts[0]
    for i, part in enumerate(parts[1:]):
        x = build.add(x, part, f"sum{i}")
    net = build.network(x, name="shared")
    one = torch.ones(1, 1, 1, 1).double()

    def wrong() -> int:
        found = crown_relaxation(net, Bounds(-one, one)).lower(x, one, torch.tensor([0]))[0]
        return excluded(found, exact(net, x, -one))

    assert last_in_float32(net, Bounds(-one, one)) == x and not wrong()
    full = rounding.accumulate
    monkeypatch.setattr(rounding, "accumulate", lambda *given: 0 * full(*given))
    assert wrong()
