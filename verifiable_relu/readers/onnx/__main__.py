"""``python -m verifiable_relu.readers.onnx`` prints the page docs/operators.md: every operator that is read."""

from __future__ import annotations

from verifiable_relu.readers.onnx.call import GROUP
from verifiable_relu.readers.onnx.constants import FOLDED
from verifiable_relu.readers.onnx.read import CONVERTERS

TITLES = {
    "affine": "Affine: sums, products with constants, movements, reductions, windows",
    "pieces": "Piecewise linear",
    "maxima": "Written with ReLUs when they are read",
    "steps": "Functions that jump",
    "smooth": "Smooth functions of one variable",
    "products": "Written with products of computed values and functions of one variable",
}

HEAD = """# Operators that are read from ONNX files

Printed by `python -m verifiable_relu.readers.onnx`. A number is the opset in which a definition of the operator began
that is read; a definition that is not listed is refused by name, and so is an operator that is not. What a file makes
of constants alone is computed when the file is read, by the standard's reference evaluator, for any of the operators at
the end.

| group | bounds (`ibp`, `crown`, `alpha-crown`, `split`) | `bab` | `milp`, `smt` | exact evaluation |
|---|---|---|---|---|
| affine | exact, up to rounding | yes | yes | yes, if weights are stored as they are meant |
| piecewise linear | best lines for each neuron | yes, by phases | yes | yes |
| written with ReLUs | of two numbers the best lines, of more one candidate below and above | yes | yes | yes |
| functions that jump | lines of an upper and a lower function of two pieces | no | no | yes |
| smooth | Sigmoid, Tanh, Gelu: best lines; others: the best of four slopes | yes, by segments | no | enclosed |
| products of computed values | means of McCormick's planes; factors by lines, too | no | no | enclosed |
"""


def page() -> str:
    """The page."""
    parts = [HEAD]
    for name, title in TITLES.items():
        rows = [f"## {title}", "", "| operator | opsets |", "|---|---|"]
        for operator in sorted({operator for operator, _ in CONVERTERS if GROUP[operator] == name}):
            versions = sorted(version for other, version in CONVERTERS if other == operator)
            rows.append(f"| {operator} | {', '.join(map(str, versions))} |")
        parts.append("\n".join(rows) + "\n")
    rest = (
        "Mul, Div, MatMul, Gemm and Einsum take two computed values, too: products as in the last group, but\n"
        "for what spells GELU, SiLU, Mish, a square or a cube. A quotient is a product with a reciprocal, of which\n"
        "nothing is known where bounds of the divisor include 0. Cast and CastLike are read where they go to float32,\n"
        "float64, int32, int64 or bool. A truth value is 0 or 1, and a number of an integer type a number, however\n"
        "large; what means something else of whole numbers, such as Div, is refused. Where a condition is computed,\n"
        "Where is a sum of two products, and affine in the condition if it chooses between constants. ArgMax and\n"
        "ArgMin are read over up to 64 numbers. Constant, Shape and Size are read in every opset. IsNaN of a computed\n"
        "value is false: of what is no number nothing is ever proved. LinearClassifier, LinearRegressor, Normalizer\n"
        "and Scaler are those of ai.onnx.ml, as skl2onnx writes them; of a classifier there are the scores, not the\n"
        "label.\n"
    )
    folded = ", ".join(sorted(FOLDED))
    return "\n".join([*parts, rest, f"## Of constants alone\n\n{folded}\n"])


if __name__ == "__main__":
    print(page(), end="")
