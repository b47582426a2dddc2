"""Charts, which a page shows as SVG, and figures for papers as matplotlib draws them (``report.figures``).

Within an HTML page they take the page's colours, and have titles and descriptions for readers of screens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH, _HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 28, 12, 44
_TICKS = 6

_MOST = 1e150
"""The largest number that an axis shows; larger ones are drawn at its end."""

_FAR, _WIDEST = 100, 1e6
"""An axis about 0 is logarithmic if half of its values are less than the largest divided by the first number. It then
reaches down to the largest divided by the second number at the least."""

COLOURS = 8
"""The number of colours that the page's style sheet has."""

_SHAPES = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.5,-3.5h7v7h-7z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,-5L4.5,4L-4.5,4z",
    "M0,5L4.5,-4L-4.5,-4z",
    "M-1.3,-4.5h2.6v3.2h3.2v2.6h-3.2v3.2h-2.6v-3.2h-3.2v-2.6h3.2z",
)
"""The outlines of markers, around the origin."""


@dataclass(frozen=True)
class Series:
    """Points of one kind.

    Attributes:
        name: in the legend.
        points: pairs (x, y).
        joined: whether a line joins the points.
        tips: a text for each point, shown where the mouse rests on it; empty for none.
        style: the number of the colour and the marker; the page's style sheet has a class ``s0``, ``s1`` … for each.
        hollow: whether the markers are outlines.
    """

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    tips: Sequence[str] = ()
    style: int = 0
    hollow: bool = False

    @property
    def classes(self) -> str:
        """The classes of the page's style sheet that the markers have."""
        return f"s{self.style % COLOURS}" + " hollow" * self.hollow


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        label: what it shows, with the unit.
        low: its start.
        high: its end, larger than ``low``.
        log: whether it is logarithmic; both ends are positive then.
        percent: whether its numbers are shown as percentages.
        linear: for an axis that is logarithmic on either side of 0, the magnitude below which it is nearly linear; a
            power of ten. 0 for any other.
    """

    label: str
    low: float
    high: float
    log: bool = False
    percent: bool = False
    linear: float = 0.0

    @staticmethod
    def about_zero(label: str, values: Sequence[float]) -> Axis:
        """The axis over values of either sign: logarithmic on both sides of 0 where most are far below the largest."""
        held = [max(-_MOST, min(v, _MOST)) for v in values if math.isfinite(v)]
        sizes = sorted(abs(v) for v in held if v)
        if not sizes or sizes[len(sizes) // 2] >= sizes[-1] / _FAR:
            return Axis.over(label, values)
        least = max(sizes[len(sizes) // 10], sizes[-1] / _WIDEST)
        low, high = 1.5 * min(0.0, *held), 1.5 * max(0.0, *held)
        return Axis(label, low, high, linear=10.0 ** math.floor(math.log10(least)))

    @staticmethod
    def over(label: str, values: Sequence[float], log: bool = False, percent: bool = False) -> Axis:
        """The axis that has room for all values, a logarithmic one for all positive values."""
        held = [max(-_MOST, min(v, _MOST)) for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = min(held, default=1.0 if log else 0.0), max(held, default=1.0)
        if log:
            low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high))
            return Axis(label, low, high if high > low else 10 * low, True, percent)
        room = max(0.04 * (high - low), 1e-6 * max(abs(low), abs(high))) or 0.5
        return Axis(label, low - room, high + room, False, percent)

    def place(self, value: float) -> float:
        """Where a value lies: 0 at the start of the axis or before it, 1 at its end or beyond."""
        value = max(self.low, min(value, self.high))
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        if self.linear:
            low, at, high = (math.asinh(v / self.linear) for v in (self.low, value, self.high))
            return (at - low) / (high - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers on the axis."""
        if self.log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first) / _TICKS)))]
        if self.linear:
            # The numbers of the nearly linear part would lie on one another.
            first, last = (round(math.log10(v)) for v in (10 * self.linear, max(-self.low, self.high)))
            powers = range(first, last + 1, max(1, math.ceil((last - first) / (_TICKS / 2))))
            sizes = [10.0**power for power in powers]
            return [v for v in (*(-s for s in reversed(sizes)), 0.0, *sizes) if self.low <= v <= self.high]
        raw = (self.high - self.low) / _TICKS
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(step for step in (size, 2 * size, 5 * size, 10 * size) if step >= raw)
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]

    def text(self, value: float) -> str:
        """A tick's label."""
        if self.percent:
            return f"{100 * value:.6g} %"
        return f"{value:.4g}" if self.linear or abs(value) > 1e-12 else "0"


@dataclass(frozen=True)
class Chart:
    """A chart of points and lines.

    Attributes:
        title: its name, for readers of screens.
        about: what it shows, in a sentence, for readers of screens.
        series: what is drawn, in this order.
        x: the horizontal axis.
        y: the vertical axis.
    """

    title: str
    about: str
    series: Sequence[Series]
    x: Axis
    y: Axis

    def svg(self) -> Markup:
        """The chart within a page, with its legend."""
        parts = [
            Markup('<svg class="chart" viewBox="0 0 {} {}" role="img"><title>{}</title><desc>{}</desc>').format(
                _WIDTH, _HEIGHT, self.title, self.about
            ),
            *_axes(self.x, self.y),
            *(_drawn(one, self.x, self.y) for one in self.series),
            Markup("</svg>"),
        ]
        return Markup("").join(parts) + _legend(self.series)


def _legend(series: Sequence[Series]) -> Markup:
    """The names of series, each beside its marker."""
    items = [
        Markup('<li><svg viewBox="-7 -7 14 14" class="mark" aria-hidden="true"><path class="{}" d="{}"/></svg>{}</li>')
        .format(one.classes, _SHAPES[one.style % len(_SHAPES)], one.name)
        for one in series
    ]  # fmt: skip
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _across(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _up(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _axes(x: Axis, y: Axis) -> Iterator[Markup]:
    bottom, left = _up(0), _across(0)
    for tick in x.ticks():
        at = _across(x.place(tick))
        yield Markup(
            '<line class="grid" x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}"/>'
            '<text x="{0:.1f}" y="{3}" text-anchor="middle">{4}</text>'
        ).format(at, _up(1), bottom, bottom + 17, x.text(tick))
    for tick in y.ticks():
        at = _up(y.place(tick))
        yield Markup(
            '<line class="grid" x1="{1}" x2="{2}" y1="{0:.1f}" y2="{0:.1f}"/>'
            '<text x="{3}" y="{4:.1f}" text-anchor="end">{5}</text>'
        ).format(at, left, _across(1), left - 6, at + 4, y.text(tick))
    yield Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(_across(0.5), _HEIGHT - 6, x.label)
    yield Markup('<text transform="translate(13,{}) rotate(-90)" text-anchor="middle">{}</text>').format(
        _up(0.5), y.label
    )


def _drawn(one: Series, x: Axis, y: Axis) -> Markup:
    places = [(_across(x.place(a)), _up(y.place(b))) for a, b in one.points if math.isfinite(a) and math.isfinite(b)]
    parts = []
    if one.joined and len(places) > 1:
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(Markup('<polyline class="line s{}" points="{}"/>').format(one.style % COLOURS, line))
    shape = _SHAPES[one.style % len(_SHAPES)]
    # Many points of a line would hide it.
    every = max(1, len(places) // 25) if one.joined else 1
    for number, (a, b) in enumerate(places):
        if number % every == 0 or number == len(places) - 1:
            tip = Markup("<title>{}</title>").format(one.tips[number]) if one.tips else ""
            parts.append(
                Markup('<path class="{}" transform="translate({:.1f},{:.1f})" d="{}">{}</path>').format(
                    one.classes, a, b, shape, tip
                )
            )
    return Markup("").join(parts)
