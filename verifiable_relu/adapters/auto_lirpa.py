"""The verifiers ``auto_lirpa…``, which prove properties by the bounds of the library auto_LiRPA, and never say *sat*.

Sources: arXiv 2002.12920 (Xu et al., the library) and 2011.13824 (Xu et al., α-CROWN). The library does not account for
rounding. It runs in a process of its own: where it crashes, fails or takes too long, one query is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verifiable_relu.bounds import Bounds, input_box
from verifiable_relu.errors import CallFailed, UnsupportedError
from verifiable_relu.network import nodes as kinds
from verifiable_relu.network.dispatch import Refusal, Table
from verifiable_relu.network.graph import Network
from verifiable_relu.network.nodes import Activation, Affine, Kinked, Node
from verifiable_relu.rounding import epsilon
from verifiable_relu.spec.property import Property
from verifiable_relu.spec.row_batch import RowBatch
from verifiable_relu.supervisor.workers import Worker
from verifiable_relu.verifiers.base import PATIENCE, Outcome, Reason, TimeBudget, Trust, Verdict
from verifiable_relu.verifiers.batch import Batched, QueryBatch

_METHODS = {"ibp": "IBP", "crown": "CROWN", "alpha-crown": "alpha-CROWN"}


@dataclass(frozen=True)
class AutoLirpa(Batched):
    """Verification by a bound of auto_LiRPA, in a process of ``process_memory`` bytes (None: half of the machine's)."""

    bound: Literal["ibp", "crown", "alpha-crown"] = "alpha-crown"
    process_memory: int | None = None

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"auto_lirpa-{self.bound}"

    def claims(self, batch: QueryBatch) -> Iterator[tuple[int, Outcome]]:
        # The library's import takes seconds, which are no query's. If it fails, each query says so.
        with suppress(CallFailed):
            AUTO_LIRPA.start()
        yield from super().claims(batch)

    def answer(self, part: QueryBatch, work: TimeBudget) -> Sequence[Outcome]:
        (query,) = part.queries.values()
        task = self.bound, part.network.nodes, query.property, torch.get_num_threads()
        margin = AUTO_LIRPA.call(task, work.left() + PATIENCE, self.process_memory)
        if isinstance(margin, str):
            raise UnsupportedError(margin)
        if margin > 0:
            return [Outcome(Verdict.UNSAT, Reason.PROVED, self.name, Trust.FLOAT, margin)]
        return [Outcome.unknown(Reason.INCOMPLETE, self.name, "the bounds do not decide", margin=margin)]


def lower_bound(task: tuple[str, tuple[Node, ...], Property, int]) -> float | str:
    """Return a lower bound of a property's margin, or a message where the library fails; its process runs this."""
    bound, nodes, prop, threads = task
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(threads)
    network, failure = Network(nodes).to(torch.float64), ""
    box, rows = input_box([prop], network, torch.float64), RowBatch.from_properties([prop], network.output_size)
    # Its sparse form of convolutions ("patches") is faster, and raises an error where it does not fit. About dilation
    # and groups it is wrong without one.
    uniform = all(getattr(node, "groups", 1) == 1 and set(getattr(node, "dilation", [1])) == {1} for node in nodes)
    for mode in ("patches", "matrix") if uniform else ("matrix",):
        try:
            lower = _lower_bounds(bound, network, box, rows, mode)
            return float(rows.margins(lower - _rounding_estimate(network, box, rows) - rows.bound))
        except Exception as error:
            if isinstance(error, MemoryError) or "allocate memory" in str(error):
                raise MemoryError from None
            failure = f"{type(error).__name__}: {error}"
    operators = ", ".join(sorted({node.op for node in nodes[1:]}))
    return f"auto_LiRPA fails on this network of {operators}: {failure}"


AUTO_LIRPA = Worker(f"{__name__}:{lower_bound.__name__}", library="verifiable_relu.search.solvers.auto_lirpa_import")


def _lower_bounds(bound: str, network: Network, box: Bounds, rows: RowBatch, mode: str) -> Tensor:
    """Return the library's lower bounds (rows,) of A·y over the box."""
    from verifiable_relu.search.solvers.auto_lirpa_import import library, library_settings

    search = {"iteration": 20, "stop_criterion_func": lambda lower: (lower > rows.bound).all(1, keepdim=True)}
    # With α that neurons or rows share, the library fails on some convolutions.
    dense = {"sparse_features_alpha": False, "sparse_spec_alpha": False}
    settings = {"conv_mode": mode, "optimize_bound_args": {"lr_alpha": 0.5, **search}, **dense}
    method = _METHODS[bound if network.activations else "crown"]
    center = box.lower + (box.upper - box.lower) / 2
    with library_settings(torch.float64), torch.set_grad_enabled(method == "alpha-CROWN"):
        module = library.BoundedModule(TracedNetwork(network), torch.zeros_like(center), settings, device="cpu")
        ball = library.PerturbationLpNorm(norm=np.inf, x_L=box.lower, x_U=box.upper)
        x = library.BoundedTensor(center, ball)
        lower: Tensor = module.compute_bounds(x=(x,), C=rows.matrix[None], method=method, bound_upper=False)[0]
    return lower[0].detach()


def _rounding_estimate(network: Network, box: Bounds, rows: RowBatch) -> Tensor:
    """Estimate, not bound, rounding (rows,) in the library: four units of the numbers summed, which may cancel."""
    sizes = [torch.maximum(-box.lower, box.upper)]
    for node in network.nodes[1:]:
        size = sizes[node.inputs[0]]
        if isinstance(node, Affine):
            size = node.absolute(size) + node.offset_magnitude()
        elif isinstance(node, Kinked):
            size = size * node.below.abs().clamp(min=1)
        elif isinstance(node, Activation):
            size = size.clamp(min=1)
        else:
            size = node.forward(*(sizes[i] for i in node.inputs))
        sizes.append(size)
    return 4 * epsilon(torch.float64) * (rows.matrix.abs() @ sizes[-1].flatten())


_FORWARD: Callable[..., Tensor] = lambda node, *xs: node.forward(*xs)  # noqa: E731

TRACED: Table[Callable[..., Tensor]] = Table(
    "auto_LiRPA",
    {
        **dict.fromkeys((kinds.Linear, kinds.Conv2d, kinds.Scale, kinds.Add, kinds.Extreme, kinds.Permute), _FORWARD),
        **dict.fromkeys((kinds.Relu, kinds.Identity, kinds.Sigmoid, kinds.Tanh, kinds.Gelu), _FORWARD),
        # The library's own operator has one slope for all neurons; of 1 − slope, it makes wrong bounds.
        kinds.LeakyRelu: lambda node, x: (x - F.relu(x)) * node.slope + F.relu(x),
        kinds.Reshape: lambda node, x: torch.flatten(x, 1) if len(node.shape) == 1 else x.reshape(-1, *node.shape),
        # A set of networks is among these: its forward pass is that of one member.
        Node: Refusal("auto_LiRPA does not take this kind of node, or its bounds of it are not tried here"),
    },
)
"""The value of each kind of node in operators that the library knows: node, values (batch, …) of its inputs ↦ value."""


def _as_convolution(node: Any) -> Node:
    """Return scaled channels as a convolution, and unequal padding as zeros around the kernel; patches pass both."""
    if isinstance(node, kinds.Conv2d) and set(node.dilation) == {1} and node.padding[:2] != node.padding[2:]:
        top, left, bottom, right = node.padding
        height, width = max(top, bottom), max(left, right)
        weight = F.pad(node.weight, (width - left, width - right, height - top, height - bottom))
        return replace(node, weight=weight, padding=(height, width, height, width))
    channels = getattr(node, "center", None) is not None and len(node.shape) == 3
    constants = (node.scale, node.offset()) if channels else ()
    if not channels or any(c.numel() > 1 and c.shape[-2:] != (1, 1) for c in constants):
        return node
    scale, bias = (c.expand(node.shape[0], 1, 1).flatten() for c in constants)
    weight = torch.diag(scale)[:, :, None, None]
    return kinds.Conv2d(name=node.name, inputs=node.inputs, shape=node.shape, weight=weight, bias=bias)


class TracedNetwork(nn.Module):
    """A network as a torch module of operators that the library knows, with flat outputs."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        # The library takes the dtype from a module's parameters, so that constants are parameters too.
        self.constants = nn.ParameterList()
        self.nodes = [_as_convolution(node).map_tensors(self._constant) for node in network.nodes[1:]]

    def _constant(self, tensor: Tensor) -> Tensor:
        self.constants.append(constant := nn.Parameter(tensor.clone(), requires_grad=False))
        return constant

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for node in self.nodes:
            values.append(TRACED[node](node, *(values[i] for i in node.inputs)))
        return values[-1] if values[-1].ndim == 2 else torch.flatten(values[-1], 1)
