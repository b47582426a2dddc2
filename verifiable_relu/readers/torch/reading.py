"""A network from a torch module: traced in evaluation mode, and believed once it has been compared.

A trace with operators that the table does not have is read by way of torch's own exporter (``exported``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.ir.enclosure import find_difference, sample_points
from verifiable_relu.ir.network import Network, Op, Shape
from verifiable_relu.readers.torch.exported import exported
from verifiable_relu.readers.torch.operators import ModuleTranslator, NotTranslated
from verifiable_relu.readers.torch.trace import trace
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import as_given, neutral


def from_torch(
    module: nn.Module,
    input_shape: Shape,
    name: str = "network",
    compared: bool = True,
    exact: bool = False,
    argument: str | None = None,
) -> Network:
    """The network that a module computes in evaluation mode.

    The module is run as its user runs it, with its hooks and whatever Python does in between, on the device and in
    the precision of its first parameter; the operators that it applies become the network (``module.operators``).
    Parameters are the module's own tensors, or derived from them by autograd, so that the network is differentiable
    with respect to them. What the table of operators lacks is written by torch's exporter into an ONNX file in memory,
    which ``read_onnx`` reads: such a network holds copies of the parameters. Training flags, buffers and the CPU's
    random numbers are afterwards what they were.

    Args:
        module: takes one tensor, (batch, *input_shape), and returns one, or a mapping or an object with
            one tensor of real numbers, or with one that is called ``logits``.
        input_shape: of one sample.
        name: what to call the network.
        compared: whether the numbers that each operator computes of four samples, and the module's outputs for these
            and for another one alone, must be the network's to within rounding. False only for whoever reads one module
            again and again, as losses do at each training step; the exporter is then not asked.
        exact: for verification: 1/c and γ/√(σ² + ε) are rounded to float64 alone, and what they are off by is known
            (``Affine.weight_error``); else they are numbers of the parameters' precision, as in a file. A module
            that computes weights or constants from its parameters, and rounds them, is refused, unless it is a
            parametrisation (``torch.nn.utils.parametrize``) or one of torch's old hooks that computes a weight.
        argument: the name of the module's argument that takes the tensor; None stands for the first one.

    Raises:
        UnsupportedError: if the module does what no network does, or its numbers are not the network's; names the
            module or operator.
        InputError: if the module fails for inputs of that shape, or a parameter is not finite.
    """
    place = f"module {type(module).__name__}"
    try:
        with _evaluating(module):
            return _read(_Called(module, argument), tuple(input_shape), name, compared, exact)
    except InputError as error:
        raise error if error.place else type(error)(error.message, place=place) from error


class _Called(nn.Module):
    """A module as what takes one tensor and returns one."""

    def __init__(self, module: nn.Module, argument: str | None) -> None:
        super().__init__()
        self.module, self.argument = module, argument

    def forward(self, x: Tensor) -> Any:
        made = self.module(x) if self.argument is None else self.module(**{self.argument: x})
        if isinstance(made, Tensor):
            return made
        named = dict(made) if isinstance(made, Mapping) else getattr(made, "__dict__", {})
        reals = [each for each in named.values() if isinstance(each, Tensor) and each.is_floating_point()]
        return named.get("logits", reals[0] if len(reals) == 1 else made)

    def named_modules(self, *how: Any, **more: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the module, by their names there."""
        return self.module.named_modules(*how, **more)


def _read(module: _Called, shape: Shape, name: str, compared: bool, exact: bool) -> Network:
    """The network by the table of operators, or where that does not do, and is to be compared, by the exporter."""
    if 0 in shape:
        raise InputError(f"an input of shape {shape} has no numbers")
    first = _first(module)
    if not compared:
        return ModuleTranslator(trace(module, first.new_zeros(1, *shape), exact), exact).network(name)[0]
    points = sample_points(shape, first.dtype).to(first.device)
    several, one = points[::3], points[1:2]
    try:
        network, ops, observed = ModuleTranslator(trace(module, several.clone(), exact), exact).network(name)
        _require_agreement(ops, several, observed, "the module is not the network that was read from it")
        _require_outputs(module, network, several, one)
    except NotTranslated as refusal:
        try:
            network = exported(trace(module, one.clone(), exact), name)
            _require_outputs(module, network, several, one)
        except InputError as error:
            # An ONNX file has float32 for numbers such as the ε of a normalisation.
            hint = "; in float32 (module.float()) it may be read" if first.dtype == torch.float64 else ""
            said = f"{refusal.message}; by way of torch's exporter: {error}{hint}"
            raise UnsupportedError(said, place=refusal.place) from error
    return network


def _require_outputs(module: nn.Module, network: Network, *batches: Tensor) -> None:
    """Make certain that what the module returns, when it is not traced, are the network's outputs."""
    said = "what it computes is not what was read, or depends on the size of the batch, or on how often it was called"
    for x in batches:
        with torch.no_grad():
            output = module(x.clone())
        shape = network.source.output_shape
        shapes = {(len(x), *shape)} | ({(len(x),)} if shape == (1,) else set())
        if not isinstance(output, Tensor) or output.shape not in shapes:
            raise UnsupportedError(f"{said}: a {type(output).__name__} of another shape")
        _require_agreement(network.ops, x, {len(network.ops) - 1: output.reshape(len(x), -1)}, said)


def _require_agreement(ops: Sequence[Op], x: Tensor, seen: dict[int, Tensor], said: str) -> None:
    """Make certain that ops are what the module was seen to compute, to within rounding; else say so."""
    found = find_difference(ops, x.flatten(1), seen, unit_roundoff(x.dtype))
    if found is not None:
        raise UnsupportedError(f"{said}: {found}", place=found.op.place)


def runner(module: nn.Module, argument: str | None = None) -> Callable[[Tensor], Tensor]:
    """The function by which a module itself computes the outputs, (1, …), of a sample, (1, …), in evaluation mode.

    Args:
        module: as ``from_torch`` takes it, and so is ``argument``. It runs on its own device, in its own precision.
    """

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        with _evaluating(module):
            made: Tensor = _Called(module, argument)(x.to(_first(module)))
            return made.cpu()

    return run


def _first(module: nn.Module) -> Tensor:
    """The tensor that says in which precision and where the module computes."""
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(is_lazy(tensor) or tensor.is_meta for tensor in tensors):
        raise UnsupportedError("it has parameters without numbers: call a lazy module once first")
    first = next((t for t in tensors if t.is_floating_point()), torch.zeros((), dtype=torch.float32, device="cpu"))
    if first.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"it is in {first.dtype}: convert it to float32 first")
    return first


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and leave flags, buffers and random numbers as they were.

    Products in float32 are really taken in float32 meanwhile, also where the user prefers speed; and attention,
    normalisations and recurrent layers are computed by the operators that they consist of, not by fused ones.
    """
    # Modules that torch.jit.freeze made have no mode.
    modules = [m for m in module.modules() if hasattr(m, "training")]
    flags = [m.training for m in modules]
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    fused = torch._C._get_mkldnn_enabled()
    cudnn = torch.backends.cudnn.flags(enabled=False)
    # ``neutral`` sees to the precision of products: to put back the user's here would undo what a block around has set.
    with neutral(), as_given(), torch.random.fork_rng(devices=[]), sdpa_kernel(SDPBackend.MATH), cudnn:
        try:
            torch._C._set_mkldnn_enabled(False)
            if any(flags):
                module.eval()
            yield
        finally:
            torch._C._set_mkldnn_enabled(fused)
            for m, was in zip(modules, flags, strict=True):
                # Parents first: ``train`` also sets the flags of what is inside.
                if m.training != was:
                    m.train(was)
            with torch.no_grad():
                for m, name, buffer, copy in buffers:
                    m._buffers[name] = buffer
                    if not torch.equal(buffer, copy):
                        buffer.copy_(copy)
