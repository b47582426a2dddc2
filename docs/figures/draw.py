"""The figures of the README and of the documentation, written as SVG.

    python docs/figures/draw.py

Each file adapts itself to a light or a dark page. ``tests/commands/test_documentation.py`` holds the committed files
against what this script writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent

STYLE = """<style>
  text { font: 14px system-ui, sans-serif; fill: #24292f; }
  .title { font-weight: 600; font-size: 16px; }
  .small { font-size: 12.5px; fill: #57606a; }
  .line { fill: none; stroke: #24292f; stroke-width: 1.2; }
  .smooth { fill: none; stroke: #0072b2; stroke-width: 2.4; }
  .sharp { fill: none; stroke: #d55e00; stroke-width: 2.4; }
  .panel { fill: #ffffff; stroke: #d0d7de; }
  .box { fill: #0072b2; fill-opacity: 0.16; stroke: #0072b2; stroke-width: 1.6; }
  .unsafe { fill: #d55e00; fill-opacity: 0.16; stroke: #d55e00; stroke-width: 1.6; stroke-dasharray: 5 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .small { fill: #9da7b3; } .line { stroke: #e6edf3; }
    .panel { fill: #0d1117; stroke: #3d444d; }
    .smooth, .box { stroke: #56b4e9; } .box { fill: #56b4e9; }
    .sharp, .unsafe { stroke: #e69f00; } .unsafe { fill: #e69f00; }
  }
</style>"""

MARKER = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 10 5 0 10" class="line"/></marker></defs>'
)


def gelu(x: float, lam: float) -> float:
    """λ-GELU, x·Φ(λx)."""
    return x * 0.5 * (1 + math.erf(lam * x / math.sqrt(2)))


def text(x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> str:
    """A line of text at a point."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kind}>{words}</text>'


def panel(x: float, y: float, width: float, height: float) -> str:
    """A frame."""
    return f'<rect class="panel" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'


def arrow(*points: tuple[float, float]) -> str:
    """A line through points with a tip at its end."""
    return f'<polyline class="line" marker-end="url(#tip)" points="{path(points)}"/>'


def path(points: Iterable[tuple[float, float]]) -> str:
    """The coordinates of a line's points."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def curve(left: float, top: float, values: Sequence[tuple[float, float]], style: str, opacity: float = 1.0) -> str:
    """The graph of a function on [−3, 2] in a square of 150 units."""
    points = path((left + 30 * (x + 3), top + 115 - 45 * y) for x, y in values)
    return f'<polyline class="{style}" opacity="{opacity:g}" points="{points}"/>'


def axes(left: float, top: float) -> str:
    """The axes of such a square."""
    across, up = ((left, top + 115), (left + 150, top + 115)), ((left + 90, top + 145), (left + 90, top + 15))
    return "".join(f'<polyline class="line" opacity="0.5" points="{path(line)}"/>' for line in (across, up))


def overview() -> str:
    """Smooth → ReLU → certificate."""
    xs = [-3 + k / 20 for k in range(101)]
    smooth = [(x, gelu(x, 1.0)) for x in xs]
    relu = [(-3.0, 0.0), (0.0, 0.0), (2.0, 2.0)]
    parts = [panel(x, 10, 270, 230) for x in (10, 315, 620)]
    parts += [arrow((283, 125), (311, 125)), arrow((588, 125), (616, 125))]
    parts += [text(145, 38, "1  Train smooth", "title"), axes(70, 50), curve(70, 50, smooth, "smooth")]
    parts += [text(145, 215, "λ-GELU, x·Φ(λx), λ = 1", "small")]
    parts += [text(450, 38, "2  Harden to ReLU", "title"), axes(375, 50)]
    for lam, opacity in ((1.0, 0.3), (2.0, 0.5), (5.0, 0.75)):
        parts.append(curve(375, 50, [(x, gelu(x, lam)) for x in xs], "smooth", opacity))
    parts += [curve(375, 50, relu, "sharp"), text(450, 215, "λ → 160, then max(x, 0): little changes", "small")]
    parts += [text(755, 38, "3  Certify", "title")]
    parts += [
        '<rect class="box" x="642" y="92" width="58" height="58"/>',
        text(671, 170, "all inputs", "small"),
        arrow((706, 121), (746, 121)),
        text(726, 112, "net", "small"),
        '<polygon class="box" points="757,104 782,88 806,100 812,128 790,150 762,140"/>',
        text(784, 170, "all outputs", "small"),
        '<polygon class="unsafe" points="838,66 882,66 882,178 826,178"/>',
        text(857, 58, "unsafe", "small"),
        text(755, 200, "unsat: the unsafe set is not reached,", "small"),
        text(755, 217, "with rounding accounted for", "small"),
    ]
    return drawing(900, 250, parts, "A smooth network is trained, hardened to ReLU, and certified")


LAYERS = (
    (("certify, solver, spec, train, …", "the commands"),),
    (("hardening", "of a network of one's own"),),
    (("report", "pages, tables, figures"), ("api", "verify(model, images, …)")),
    (("campaign", "many questions: queue, records, certificates"),),
    (("search", "auto, attack, split, bab, milp, smt, …"), ("proof", "certificates")),
    (("train", "λ schedules, losses"), ("trust", "checks counterexamples")),
    (("bounds", "IBP, CROWN, α-CROWN, zonotopes, with their rounding"),),
    (("spec", "properties, VNN-LIB"), ("execution", "as it runs: float32, int8")),
    (("readers", "from ONNX and torch, to ONNX"),),
    (("ir", "flat networks, linear maps, functions"),),
    (("nn", "λ-GELU, models"), ("data", "data sets")),
    (("rounding, dyadic, files, journal, runtime, …", "what all of these stand on"),),
)


def architecture() -> str:
    """The layers of the package, and the checker beside them."""
    parts, row, top = [], 52, 20
    for number, rooms in enumerate(LAYERS):
        width = (560 - 16 * (len(rooms) - 1)) / len(rooms)
        for place, (name, about) in enumerate(rooms):
            x, y = 20 + place * (width + 16), top + number * row
            parts += [panel(x, y, width, 42), text(x + width / 2, y + 18, name, "title")]
            parts += [text(x + width / 2, y + 34, about, "small")]
    height = len(LAYERS) * row
    parts += [arrow((600, top), (600, top + height - 14)), text(606, top + height / 2, "knows", "small", "start")]
    parts += [
        panel(680, top, 190, 112),
        text(775, top + 26, "check", "title"),
        text(775, top + 50, "checks certificates;", "small"),
        text(775, top + 68, "reads the files by itself,", "small"),
        text(775, top + 86, "shares no code", "small"),
        text(775, top + 104, "with the rest", "small"),
    ]
    return drawing(890, 2 * top + height - 12, parts, "The layers of the package")


def drawing(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """A whole file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
    return "\n".join([head, f"<title>{title}</title>", STYLE, MARKER, *parts, "</svg>\n"])


FIGURES = {"overview.svg": overview, "architecture.svg": architecture}


def main() -> None:
    """Write all figures beside this script."""
    for name, draw in FIGURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
