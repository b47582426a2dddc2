"""The graph of a network: its nodes in topological order, with one input and one output."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.nodes import (
    STEPS,
    Activation,
    Add,
    Affine,
    Beside,
    Bilinear,
    Curve,
    Identity,
    Input,
    Kinked,
    Maximum,
    Node,
    Permute,
    Reshape,
    Scale,
    Seen,
    Shape,
    Sparse,
    Step,
)
from verifiable_relu.readers.derived import both, lost

Made = TypeVar("Made")


class Once:
    """Values by key, each made when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What ``make`` returned for the key when the key was new."""
        if key not in self._made:
            # A tensor made in inference mode could not take part in a gradient later.
            with torch.inference_mode(False):
                self._made[key] = make()
        found: Made = self._made[key]
        return found


def device(name: str) -> str:
    """The torch device of a name, of which it is certain that it exists; ``auto`` is a GPU if there is one.

    Raises:
        InputError: if torch does not have it.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    require_device(name)
    return name


def require_device(name: str) -> None:
    """Make certain that torch has the device, and that numbers come back from it (``meta`` holds none).

    Raises:
        InputError: if it does not.
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError) as error:
        # What torch says first is enough; it goes on for a page.
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise InputError(f"no device '{name}': {reason}") from None


@dataclass(frozen=True, eq=False)
class Network:
    """A frozen, topologically ordered graph with one input (node 0) and one output (the last node).

    Args:
        nodes: the operators; each names its inputs by index, all smaller than its own.
        onnx: the bytes of the ONNX file it was read from, for replay; None if it was made from torch.
        run: computes the outputs (1, *output_shape) of one sample, float32 (1, *input_shape), as whatever the network
            was read from does, for replay; None if that is a file or nothing.
        name: what to call it in messages and tables.
        batched: whether the ONNX input has a leading batch axis; without one, the file takes a single sample.
        ports: where the network takes or gives several tensors of the user's file as one vector: their ONNX shapes with
            a batch of 1, by name, the inputs before the outputs. ``onnx`` is then a file with one of each, too. Empty
            where the user's file has one input and one output.
        arithmetic: how the file is computed by what runs it (``rounding.ARITHMETICS``); ``real`` where it is taken as a
            function of real numbers. Of any other the nodes' errors are those of that arithmetic.
        mended: how a file was read that the standard's checker refuses or that leaves something open, such as nodes out
            of order, and where a set of networks does not have that of the file: a sentence for each.

    Attributes:
        once: keeps what is computed from the nodes, by key, for as long as the network lives. A network never changes:
            one in another dtype or on another device is another network.

    Raises:
        InputError: if the graph is out of order, or a parameter is not finite.
    """

    nodes: tuple[Node, ...]
    onnx: bytes | None = None
    run: Callable[[Tensor], Tensor] | None = field(default=None, repr=False, kw_only=True)
    name: str = "network"
    batched: bool = True
    ports: Mapping[str, Shape] = field(default_factory=dict)
    arithmetic: str = "real"
    mended: tuple[str, ...] = field(default=(), kw_only=True)
    once: Once = field(default_factory=Once, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.nodes or not isinstance(self.nodes[0], Input):
            raise InputError("a network starts with its input node")
        for index, node in enumerate(self.nodes):
            if any(source >= index for source in node.inputs):
                raise InputError("inputs come after the node", place=node.place)
            for f in fields(node):
                value = getattr(node, f.name)
                if isinstance(value, Tensor) and not _finite(value):
                    raise InputError(f"{f.name} holds NaN or infinity", place=node.place)

    @property
    def input_shape(self) -> Shape:
        """Shape of one input sample."""
        return self.nodes[0].shape

    @property
    def output_shape(self) -> Shape:
        """Shape of one output sample."""
        return self.nodes[-1].shape

    @cached_property
    def uses(self) -> Counter[int]:
        """How often each node, by index, is an input of another."""
        return Counter(source for node in self.nodes for source in node.inputs)

    @cached_property
    def input_size(self) -> int:
        """Number of input variables (X_0 … in VNN-LIB, in row-major order)."""
        return self.nodes[0].size

    @cached_property
    def output_size(self) -> int:
        """Number of output variables (Y_0 … in VNN-LIB, in row-major order)."""
        return self.nodes[-1].size

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """Indices of the activation nodes, in order."""
        return tuple(i for i, node in enumerate(self.nodes) if isinstance(node, Activation))

    @cached_property
    def uncertified(self) -> tuple[Activation, ...]:
        """The activation nodes that certificates do not know, in order."""
        return tuple(node for node in self.nodes if isinstance(node, Activation) and not node.certified)

    @cached_property
    def affine(self) -> tuple[Affine, ...]:
        """The affine nodes, in order."""
        return tuple(node for node in self.nodes if isinstance(node, Affine))

    @cached_property
    def widest(self) -> tuple[int, ...]:
        """How many neurons the largest node has, of each node and all after it, in node order."""
        return tuple(itertools.accumulate((node.size for node in reversed(self.nodes)), max))[::-1]

    @cached_property
    def maxima(self) -> dict[int, Maximum]:
        """The nodes that are maxima, by index."""
        return {index: node for index, node in enumerate(self.nodes) if isinstance(node, Maximum)}

    @cached_property
    def differences(self) -> frozenset[int]:
        """The nodes that are activations of a network beside another's."""
        return frozenset(index for index, node in enumerate(self.nodes) if isinstance(node, Beside))

    @cached_property
    def joins(self) -> bool:
        """Whether computed values are added to each other, as shortcuts are."""
        return any(isinstance(node, Add) for node in self.nodes)

    @property
    def paired(self) -> bool:
        """Whether some nodes are those of a network beside another."""
        return bool(self.differences)

    @cached_property
    def spared(self) -> frozenset[int]:
        """The nodes that nothing needs but the tournaments of maxima: bounds do without them."""
        last = len(self.nodes) - 1
        every, needed = {last}, {last}
        for index in range(last, -1, -1):
            every.update(self.nodes[index].inputs if index in every else ())
            needed.update(self.nodes[index].seen_through if index in needed else ())
        return frozenset(every - needed)

    @cached_property
    def whole(self) -> frozenset[int]:
        """The nodes whose values are whole numbers whatever the input is, as far as is known, by index."""
        return whole(self.nodes)

    @cached_property
    def counts(self) -> bool:
        """Whether bounds take notice of ``whole``: not where numbers are rounded, and not where certificates know all
        activations, as those of a quantised network, since whoever checks them takes none."""
        return self.arithmetic == "real" and bool(self.uncertified) and bool(self.whole)

    @cached_property
    def keeping(self) -> frozenset[int]:
        """The nodes that make whole numbers of whole numbers, by index."""
        return frozenset(index for index, node in enumerate(self.nodes) if node.inputs and _keeps_whole(node))

    @cached_property
    def counted(self) -> dict[str, Tensor]:
        """The inputs of which nothing but whole numbers matters: by the function of ``STEPS`` that makes these of them,
        the places of some, flat."""
        return counted(self.nodes)

    @cached_property
    def last_activation(self) -> int:
        """The index of the last activation node, or of what lies beside it (``Beside``); 0 if there is none."""
        return max((i for i, node in enumerate(self.nodes) if isinstance(node, Activation | Beside)), default=0)

    @cached_property
    def piecewise_linear(self) -> bool:
        """Whether the network is piecewise linear, so that MILP and SMT are complete and evaluation exact."""
        return not self.multiplies and all(isinstance(self.nodes[i], Kinked) for i in self.activations)

    @cached_property
    def multiplies(self) -> bool:
        """Whether the network multiplies computed values with each other."""
        return any(isinstance(node, Bilinear) for node in self.nodes)

    def require_piecewise_linear(self) -> None:
        """Refuse a network that is not piecewise linear.

        Raises:
            UnsupportedError: naming the first node that is not.
        """
        for node in self.nodes:
            if isinstance(node, Bilinear):
                raise UnsupportedError("only piecewise-linear networks can be split into phases", place=node.place)
            if isinstance(node, Activation) and not isinstance(node, Kinked):
                raise UnsupportedError("only piecewise-linear activations can be split into phases", place=node.place)

    @cached_property
    def limit(self) -> Network:
        """The network in which every ``Hardened`` activation is ReLU; the network itself if it has none."""
        nodes = tuple(node.limit for node in self.nodes)
        if all(limit is node for limit, node in zip(nodes, self.nodes, strict=True)):
            return self
        return replace(self, nodes=nodes, onnx=None, run=None)

    @cached_property
    def weight_error(self) -> float:
        """The largest relative error of any stored weight against the operator that it stands for."""
        return max((node.weight_error for node in self.affine), default=0.0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over operators, wiring and the bits of every parameter: equal digests compute the same function."""
        state = hashlib.sha256()
        for node in self.nodes:
            for f in fields(node):
                value = getattr(node, f.name)
                # Networks have kept the digests of the time before there was a second kind of error, divisors, and
                # families of other functions than GELU.
                if f.name in ("name", "divisor") or (f.name == "offset_terms" and not value):
                    continue
                if (node.op, f.name, value) == ("Hardened", "function", "GELU"):
                    continue
                if isinstance(value, Tensor):
                    array = value.detach().cpu().contiguous().numpy()
                    state.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
                else:
                    state.update(f"{node.op}.{f.name}={value!r};".encode())
        return state.hexdigest()

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Network:
        """The same network with its tensors in ``dtype`` on ``device``. Cached.

        float32 weights widen exactly; where narrowing changes a weight, ``weight_error`` grows by as much.
        """
        key = (dtype, torch.device(device))
        if self._kinds <= {key}:
            return self
        return self.once(key, lambda: replace(self, nodes=tuple(_converted(node, *key) for node in self.nodes)))

    def values(self, x: Tensor) -> list[Tensor]:
        """Every node's value for inputs x shaped (batch, *input_shape), in node order."""
        values: list[Tensor] = []
        for node in self.nodes:
            values.append(node.forward(*(values[i] for i in node.inputs)) if node.inputs else x)
        return values

    def __call__(self, x: Tensor) -> Tensor:
        """Run forward on x shaped (batch, *input_shape), in the dtype of x; returns (batch, *output_shape).

        Raises:
            InputError: if the shape of x does not match.
        """
        if tuple(x.shape[1:]) != self.input_shape:
            raise InputError(
                f"input of shape {tuple(x.shape)} where (batch, {', '.join(map(str, self.input_shape))}) is expected"
            )
        return self.to(x.dtype, x.device).values(x)[-1]

    @cached_property
    def _kinds(self) -> frozenset[tuple[torch.dtype, torch.device]]:
        """The dtypes and devices of all tensors of floating point."""
        tensors = (getattr(node, f.name) for node in self.nodes for f in fields(node))
        return frozenset((t.dtype, t.device) for t in tensors if isinstance(t, Tensor) and t.is_floating_point())


def _finite(value: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity: both show in its extremes, which need no copy of it."""
    return not value.numel() or all(math.isfinite(end) for end in torch.aminmax(value.detach()))


def _converted(node: Node, dtype: torch.dtype, device: torch.device) -> Node:
    """A node with its tensors in another dtype on another device."""
    made = node.map_tensors(lambda t: t.to(device, dtype))
    if not isinstance(node, Affine):
        return made
    error = 0.0
    for f in fields(node):
        before = getattr(node, f.name)
        if isinstance(before, Tensor) and before.is_floating_point() and before.dtype.itemsize > dtype.itemsize:
            # A weight that vanishes has no relative error; the bounds are then infinite, and prove nothing.
            error = max(error, lost(before, getattr(made, f.name)))
    if not error:
        return made
    assert isinstance(made, Affine)
    return made.with_error(both(node.weight_error, error) if error < 1 else math.inf)


def whole(nodes: Sequence[Node]) -> frozenset[int]:
    """The nodes whose values are whole numbers whatever the input is, as far as is known, by index."""
    found: set[int] = set()
    for index, node in enumerate(nodes):
        if isinstance(node, Step) or (node.inputs and found.issuperset(node.inputs) and _keeps_whole(node)):
            found.add(index)
    return frozenset(found)


def counted(nodes: Sequence[Node]) -> dict[str, Tensor]:
    """As ``Network.counted``, of nodes of which the last is the output."""
    names = [name for name, known in STEPS.items() if known.band is not None]
    taken = torch.zeros(len(names) + 1, nodes[0].size, dtype=torch.bool)
    # Which input each element of a node is; the last number stands for none.
    copies = {0: torch.arange(nodes[0].size)}
    for index, node in enumerate(nodes):
        for source in (i for i in node.inputs if i in copies):
            places = copies[source]
            if isinstance(node, Reshape):
                copies[index] = places
            elif isinstance(node, Sparse) and node.moves:
                copies[index] = torch.where(node.weight[:, 0] != 0, places[node.index[:, 0]], -1)
            else:
                function = node.function if isinstance(node, Step) else ""
                taken[names.index(function) if function in names else -1, places[places >= 0]] = True
    last = copies.get(len(nodes) - 1, taken.new_zeros(0, dtype=torch.long))
    taken[-1, last[last >= 0]] = True
    alone = taken.sum(0) == 1
    return {name: (taken[i] & alone).nonzero().squeeze(1) for i, name in enumerate(names) if (taken[i] & alone).any()}


def _keeps_whole(node: Node) -> bool:
    """Whether a node makes whole numbers of whole numbers."""
    if isinstance(node, Affine):
        names = ("center", "scale", "shift") if isinstance(node, Scale) else ("weight", "bias")
        return not node.weight_error and all(_all_whole(getattr(node, name)) for name in names)
    if isinstance(node, Kinked):
        return _all_whole(node.below)
    if isinstance(node, Curve):
        return node.function in ("Square", "Cube")
    return isinstance(node, Add | Bilinear | Identity | Seen | Reshape | Permute)


def _all_whole(numbers: Tensor) -> bool:
    return bool((numbers == numbers.round()).all())
