"""The bounds of auto_LiRPA, with the settings that are fastest for it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.clock import Late, limited, seconds
from benchmarks.speed.bounds_cases import ITERATIONS
from benchmarks.speed.bounds_ours import Problem, feeding
from verifiable_relu.ir.interval import Interval
from verifiable_relu.ir.linear import Convolution
from verifiable_relu.ir.network import Affine, Elementwise, Network, Op, Shape
from verifiable_relu.search.solvers.auto_lirpa import Traced, TracedNetwork

_NAMES = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}
"""The library's names of the methods."""

PARTS = (1, 16)
"""The numbers of images that the library may get at once in place of a batch, which is slower on some networks."""


@dataclass(frozen=True)
class Settings:
    """The settings of auto_LiRPA on which its speed depends.

    Attributes:
        conv: the representation of coefficients of convolutions, ``patches`` or ``matrix``.
        sparse: whether α is stored for unstable neurons alone.
        inference: whether the library runs in torch's inference mode.
        images: the number of images of a batch that the library gets at once.
    """

    conv: str
    sparse: bool
    inference: bool
    images: int

    def __str__(self) -> str:
        return f"{self.conv}, {'sparse' if self.sparse else 'dense'} α, {self.images} at once"


class _WithGelu(TracedNetwork):
    """A network as the library traces it, with λ-GELU as well, by the operator that newer versions of it know."""

    def _step(self, op: Op) -> tuple[Shape, Traced]:
        if not (isinstance(op, Elementwise) and op.function.kind == "GELU"):
            return super()._step(op)
        try:
            gelu = import_module("auto_LiRPA.operators.gelu").GELUOp.apply
        except (ImportError, AttributeError):
            gelu = torch.nn.functional.gelu
        lam = self._constant(torch.as_tensor(op.function.parameters["parameter"]))
        return self._shapes[op.inputs[0]], lambda x: gelu(lam * x) / lam


class Theirs:
    """auto_LiRPA, prepared once for a network, dtype and settings."""

    def __init__(
        self, network: Network, method: str, dtype: torch.dtype, settings: Settings, *, given: bool = True
    ) -> None:
        self.method = _NAMES[method]
        self.given = given and method == "alpha-crown"
        self.inference, self.images = settings.inference, settings.images
        self.dtype = dtype
        options = {
            "conv_mode": settings.conv,
            "sparse_features_alpha": settings.sparse,
            "sparse_spec_alpha": settings.sparse,
            # No early stop.
            "optimize_bound_args": {"iteration": ITERATIONS, "early_stop_patience": ITERATIONS + 1},
        }
        self.shape = network.source.input_shape
        dummy = torch.zeros(1, *self.shape, dtype=dtype)
        self.settings = _adapter().library_settings
        with self.settings(dtype):
            module = _adapter().library.BoundedModule
            self.module = module(_WithGelu(network).to(dtype), dummy, options, device="cpu")

    def __call__(self, problem: Problem) -> Tensor:
        """The library's lower bounds of a problem's rows, (batch, rows)."""
        parts = self._parts(problem)
        with self.settings(self.dtype):
            return torch.cat([self._bounds(part) for part in parts])

    def seconds(self, problem: Problem, least: float = 0.0) -> float:
        """The wall-clock seconds of one run (``common.clock.seconds``), without the adapter's preparations."""
        parts = self._parts(problem)
        with self.settings(self.dtype):
            return seconds(lambda: [self._bounds(part) for part in parts], least)

    def _parts(self, problem: Problem) -> list[Problem]:
        """The parts of a problem that the library gets one after another."""
        return problem.parts(self.images, bounded=self.given)

    def _bounds(self, problem: Problem) -> Tensor:
        library = _adapter().library
        low, high = (end.reshape(-1, *self.shape) for end in (problem.box.lower, problem.box.upper))
        with torch.inference_mode() if self.inference else torch.set_grad_enabled(self.method == "alpha-CROWN"):
            ball = library.PerturbationLpNorm(norm=np.inf, x_L=low, x_U=high)
            x = library.BoundedTensor((low + high) / 2, ball)
            lower, _ = self.module.compute_bounds(
                x=(x,), C=problem.objective, method=self.method, bound_upper=False, **self._given(problem)
            )
        return lower.detach()

    def _inputs(self) -> list[Any]:
        """The library's nodes before each activation, in the order of this package's activations."""
        return [node.inputs[0] for node in self.module._modules.values() if type(node).__name__ == "BoundRelu"]

    def preactivations(self, problem: Problem) -> dict[int, Interval]:
        """The library's bounds of what feeds each activation, by the op's number in this package, of a separate run."""
        found: dict[int, list[Interval]] = {i: [] for i in feeding(problem.network)}
        for part in self._parts(problem):
            with self.settings(self.dtype):
                self._bounds(part)
            for boxes, node in zip(found.values(), self._inputs(), strict=True):
                lower, upper = (side.detach().double().flatten(1) for side in (node.lower, node.upper))
                boxes.append(Interval(lower, upper))
        return {
            i: Interval(torch.cat([b.lower for b in boxes]), torch.cat([b.upper for b in boxes]))
            for i, boxes in found.items()
        }

    def _given(self, problem: Problem) -> dict[str, Any]:
        """The arguments that give the library this package's intermediate bounds, for α-CROWN.

        Without them, the library would optimise its own intermediate bounds at every step.
        """
        if not self.given:
            return {}
        known = inspect.signature(self.module.compute_bounds).parameters
        option = "interm_bounds" if "interm_bounds" in known else "intermediate_layer_bounds"
        # The library writes into these tensors, so that it gets copies.
        bounds = {
            node.name: [end.to(self.dtype, copy=True).reshape(-1, *node.output_shape[1:]) for end in (x.lower, x.upper)]
            for node, x in zip(self._inputs(), (problem.pre[i] for i in feeding(problem.network)), strict=True)
        }
        return {option: bounds}


def fastest(problem: Problem, method: str, dtype: torch.dtype, limit: float) -> tuple[Theirs, str]:
    """auto_LiRPA with the settings that take least time on this problem, and their names.

    Raises:
        Late, or what the library raised: if no settings work within the limit.
    """
    convolutions = any(isinstance(op, Affine) and isinstance(op.map, Convolution) for op in problem.network.ops)
    alpha, batch = method == "alpha-crown", len(problem.objective)
    best: tuple[float, Theirs, str] | None = None
    failure: BaseException | None = None
    for settings in (
        Settings(conv, sparse, inference, images)
        for images in (*(n for n in PARTS if n < batch), batch)
        for conv in (("patches", "matrix") if convolutions else ("patches",))
        for sparse in ((True, False) if alpha else (True,))
        for inference in ((False,) if alpha else (True, False))
    ):
        try:
            with limited(limit if best is None else min(limit, 3 * best[0] + 1)):
                theirs = Theirs(problem.network, method, dtype, settings)
                # One part stands for all.
                first, *others = theirs._parts(problem)
                theirs(first)
                taken = theirs.seconds(first) * (1 + len(others))
        except (Exception, Late) as error:
            failure = failure or error
            continue
        if best is None or taken < best[0]:
            best = (taken, theirs, str(settings))
    if best is None:
        assert failure is not None
        raise failure
    return best[1:]


def library_version() -> str:
    """auto_LiRPA's version, or that there is none."""
    try:
        return str(_adapter().library.__version__)
    except ImportError:
        return "none"


def _adapter() -> Any:
    """The module that imports auto_LiRPA, which need not be installed."""
    return import_module("verifiable_relu.search.solvers.auto_lirpa_import")
