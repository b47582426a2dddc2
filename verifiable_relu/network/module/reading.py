"""A network from a torch module: captured in evaluation mode, and believed once it has been compared.

What is not followed is read by way of torch's own exporter: an ONNX file in memory, read as any other. The exporter
runs the module on one sample and writes down the operators that it applies. That Python does not look at computed
numbers on the way is made certain before (``capture``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from verifiable_relu.errors import InputError, UnsupportedError
from verifiable_relu.network.agreement import parting
from verifiable_relu.network.graph import Network
from verifiable_relu.network.module.capture import NotFollowed, capture, once, parametrised
from verifiable_relu.network.module.operators import OPERATORS, Translator
from verifiable_relu.network.module.unrolled import Unrolled
from verifiable_relu.network.nodes import Shape
from verifiable_relu.network.onnx import read_onnx
from verifiable_relu.rounding import unit_roundoff
from verifiable_relu.settings import as_given

_AS_IT_IS: dict[bool, dict[str, Any]] = {
    False: {"training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False},
    True: {"optimize": False},
}
"""Options with which each of the exporters computes nothing in advance."""


def exported(module: nn.Module, x: Tensor, name: str, exact: bool = False) -> Network:
    """The network of the file that torch's exporter writes.

    Args:
        module: in evaluation mode.
        x: one sample, (1, *input_shape).
        name: of the network.
        exact: whether the exporter may compute nothing in advance, such as convolutions with the batch normalisation
            after them, which it rounds; weights of ``parametrised`` layers are constants of the file.

    Raises:
        UnsupportedError: if the module cannot be exported.
        InputError: if the file cannot be read.
    """
    if exact:
        with parametrised(module, once), torch.no_grad():
            # What is traced from here on finds the weights computed.
            module(x.clone())
            return _written(module, x, name, _AS_IT_IS)
    return _written(module, x, name, {False: {}, True: {}})


def _written(module: nn.Module, x: Tensor, name: str, options: dict[bool, dict[str, Any]]) -> Network:
    # The exporter that is torch's default knows more operators; the other takes a tenth of the time and no further
    # package.
    ways = [False, True] if importlib.util.find_spec("onnxscript") else [False]
    # What it logs of a failure goes to the screen past Python's streams.
    log, silent = torch._C._jit_onnx_log, lambda *what: None
    for dynamo in ways:
        file, silence = io.BytesIO(), io.StringIO()
        logging.disable(logging.WARNING)
        torch._C._jit_onnx_log = silent
        try:
            with (
                Unrolled(),
                warnings.catch_warnings(),
                contextlib.redirect_stdout(silence),
                contextlib.redirect_stderr(silence),
            ):
                warnings.simplefilter("ignore")
                torch.onnx.export(module, (x.clone(),), file, dynamo=dynamo, **options[dynamo])  # type: ignore[arg-type]
        except Exception as error:  # the exporter's exceptions share no narrower base
            failure = error
        else:
            return read_onnx(file.getvalue(), name)
        finally:
            logging.disable(logging.NOTSET)
            torch._C._jit_onnx_log = log
    raise NotFollowed("torch cannot export the module") from failure


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
    the precision of its first parameter; the operators that it applies become the network (``module.operators`` has
    those that are understood). Its parameters are the module's own tensors, or derived from them by autograd, so that
    the network is differentiable with respect to them. 1/c of a division by c and γ/√(σ² + ε) of a batch
    normalisation are numbers of the parameters' precision: the network *is* what ``write_onnx`` writes, and its
    outputs differ from the module's by float rounding only.

    With ``compared``, the module is captured for a batch of three (normal numbers of two scales, and zeros) and for
    a batch of one (numbers of [0, 1]), which must give the same network. The numbers that each operator computes must
    be the node's to within rounding (``agreement``), and so must what the module returns for both batches without
    being captured. A module that does something else for larger batches is not found out.

    Where the module does what is not recorded here (attention, pooling, normalisation by a computed variance, and other
    activations, say), torch's exporter writes it as an ONNX file in memory, which ``read_onnx`` reads: the network then
    holds copies of the parameters, and is compared with the module likewise. What no fixed network does is refused in
    any case.

    Training flags, buffers and the CPU's random numbers are afterwards what they were. What hooks do to other
    objects, stays done.

    Args:
        module: takes one tensor, (batch, *input_shape), and returns one, or a mapping or an object with
            one tensor of real numbers, or with one that is called ``logits``.
        input_shape: of one sample.
        name: what to call the network.
        compared: False only for whoever reads one module again and again, as losses do at each training step.
        exact: for verification: 1/c and γ/√(σ² + ε) are rounded to float64 alone, and what they are off by is known
            (``Affine.weight_error``). A module that computes weights or constants from its parameters, so that they are
            rounded in its precision, is refused, unless it is a parametrisation (``torch.nn.utils.parametrize``) or one
            of torch's old hooks that computes a weight: that is one of the module's numbers. Python's numbers are
            those of the precision in which torch takes them.
        argument: the name of the module's argument that takes the tensor; None stands for the first one.

    Raises:
        UnsupportedError: if the module does what no network does, or its numbers are not the network's; names the
            module or operator.
        InputError: if the module fails for inputs of that shape, or a parameter is not finite.
    """
    shape = tuple(input_shape)
    if 0 in shape:
        raise InputError(f"an input of shape {shape} has no numbers", place=_class(module))
    first = _first(module)
    batches = [_several(shape, first), _one(shape, first)] if compared else [_one(shape, first)]
    try:
        with _evaluating(module):
            return _read(_Called(module, argument), shape, batches, name, compared, exact)
    except InputError as error:
        raise error if error.place else type(error)(error.message, place=_class(module)) from error


class _Called(nn.Module):
    """A module as what takes one tensor and returns one.

    Args:
        module: the module.
        argument: as in ``from_torch``.

    Attributes:
        plain: whether the module by itself did so when it ran last.
    """

    def __init__(self, module: nn.Module, argument: str | None) -> None:
        super().__init__()
        self.module, self.argument, self.plain = module, argument, True
        self.training = getattr(module, "training", False)

    def forward(self, x: Tensor) -> Any:
        made = self.module(x) if self.argument is None else self.module(**{self.argument: x})
        self.plain = isinstance(made, Tensor) and self.argument is None
        if isinstance(made, Tensor):
            return made
        named = dict(made) if isinstance(made, Mapping) else getattr(made, "__dict__", {})
        reals = [each for each in named.values() if isinstance(each, Tensor) and each.is_floating_point()]
        return named.get("logits", reals[0] if len(reals) == 1 else made)

    def named_modules(self, *how: Any, **more: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the module, by their names there."""
        return self.module.named_modules(*how, **more)


def _read(module: _Called, shape: Shape, batches: list[Tensor], name: str, compared: bool, exact: bool) -> Network:
    """The network by the module's own record, or where that does not do, and is to be compared, by the exporter."""
    try:
        return _followed(module, shape, batches, name, compared, exact)
    except NotFollowed as refusal:
        if not compared:
            raise
        try:
            network = exported(module.module if module.plain else module, batches[-1], name, exact)
            for x in batches:
                _require_output(module, network, x)
        except NotFollowed as error:
            # What torch has to say of it concerns its exporter alone.
            raise UnsupportedError(refusal.message, place=refusal.place) from error
        except InputError as error:
            # An ONNX file has float32 for numbers such as the ε of a normalisation.
            hint = "; in float32 (module.float()) it may be read" if batches[-1].dtype == torch.float64 else ""
            raise UnsupportedError(
                f"{refusal.message}; by way of torch's exporter: {error}{hint}", place=refusal.place
            ) from error
    return network


def _require_output(module: nn.Module, network: Network, x: Tensor) -> None:
    """Make certain that a network's outputs are the module's, in shape and to within rounding."""
    with torch.no_grad():
        output = module(x.clone())
    if isinstance(output, Tensor) and output.shape == (len(x),) and network.output_shape == (1,):
        # One number for each sample: a file has it in a vector of one number, as it has a batch of one.
        output = output[:, None]
    if not isinstance(output, Tensor) or output.shape != (len(x), *network.output_shape):
        raise UnsupportedError("outputs of another shape for several samples")
    _require_agreement(network, x, {len(network.nodes) - 1: output})


def _followed(
    module: nn.Module, shape: Shape, batches: list[Tensor], name: str, compared: bool, exact: bool
) -> Network:
    """The network of the operators that the module was seen to apply."""
    programs = [capture(module, x, OPERATORS, observe=compared, exact=exact) for x in batches]
    read = [
        Translator(program, len(x), shape, x.device, exact).network(name)
        for program, x in zip(programs, batches, strict=True)
    ]
    if compared:
        _compare(module, batches, read)
    for program in programs:
        program.require_unchanged()
    return read[0][0]


def runner(module: nn.Module, argument: str | None = None) -> Callable[[Tensor], Tensor]:
    """The function by which a module itself computes the outputs, (1, …), of a sample, (1, …), in evaluation mode.

    Args:
        module: as ``from_torch`` takes it, and so is ``argument``. It runs on its own device, in its own precision.
    """

    @torch.no_grad()
    def run(x: Tensor) -> Tensor:
        with as_given(), _evaluating(module):
            given = x.to(_first(module))
            made: Tensor = _Called(module, argument)(given)
            return made.cpu()

    return run


def _class(module: nn.Module) -> str:
    return f"module {type(module.module if isinstance(module, _Called) else module).__name__}"


def _first(module: nn.Module) -> Tensor:
    """The tensor that says in which precision and where the module computes."""
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(is_lazy(tensor) or tensor.is_meta for tensor in tensors):
        raise UnsupportedError("it has parameters without numbers: call a lazy module once first", place=_class(module))
    first = next((t for t in tensors if t.is_floating_point()), torch.zeros((), dtype=torch.float32, device="cpu"))
    if first.dtype not in (torch.float32, torch.float64):
        raise UnsupportedError(f"it is in {first.dtype}: convert it to float32 first", place=_class(module))
    return first


def _several(shape: Shape, like: Tensor) -> Tensor:
    """A batch of normal numbers, of ten times normal numbers and of zeros."""
    normal = torch.randn(3, *shape, generator=torch.Generator("cpu").manual_seed(3), device="cpu")
    scales = torch.tensor([1.0, 10.0, 0.0], device="cpu")
    return (normal * scales.reshape(-1, *(1,) * len(shape))).to(like)


def _one(shape: Shape, like: Tensor) -> Tensor:
    """A batch of one sample of numbers of [0, 1]."""
    return torch.rand(1, *shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(like)


def _compare(module: nn.Module, batches: list[Tensor], read: list[tuple[Network, dict[int, Tensor]]]) -> None:
    """Make certain that both networks are one, and that it computes what the module computes."""
    (network, several), (other, one) = read
    _require_same(network, other)
    seen = {node: torch.cat([several[node], one[node]]) for node in several}
    inputs = torch.cat(batches)
    _require_agreement(network, inputs, seen)
    last = len(network.nodes) - 1
    # Where the module returns its input, the last node is no operator's.
    outputs = seen.get(last, inputs)
    for x, captured in zip(batches, outputs.split([len(x) for x in batches]), strict=True):
        with torch.no_grad():
            output = module(x.clone())
        if not isinstance(output, Tensor) or output.shape != captured.shape:
            raise UnsupportedError("it returns something else when it is not captured", place=_class(module))
        # Bit by bit, as a rule; then nothing is left to be explained by rounding.
        if not torch.equal(output.cpu(), captured.cpu()):
            _require_agreement(network, x, {last: output})


def _require_agreement(network: Network, x: Tensor, seen: dict[int, Tensor]) -> None:
    # What has no axis but that of samples is a vector of one in a network.
    shaped = {index: value.reshape(len(x), *network.nodes[index].shape) for index, value in seen.items()}
    found = parting(network.nodes, x, shaped, unit_roundoff(x.dtype))
    if found is not None:
        place = found.node.place
        raise UnsupportedError(f"the module is not the network that was read from it: {found}", place=place)


def _require_same(network: Network, other: Network) -> None:
    """Make certain that two captures of one module gave the same."""
    for ours, theirs in zip(network.nodes, other.nodes, strict=False):
        if type(ours) is not type(theirs) or not all(
            _equal(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours)
        ):
            break
    else:
        if len(network.nodes) == len(other.nodes):
            return
    raise UnsupportedError(
        "what it computes depends on the size of the batch, on random numbers or on how often it was called",
        place=ours.place,
    )


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.dtype == b.dtype and torch.equal(a, b))
    return a == b


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and leave flags, buffers and random numbers as they were.

    Products in float32 are really taken in float32 meanwhile, also where the user prefers speed; and attention is
    computed by the operators that it consists of, not by torch's fused one.
    """
    # Modules that torch.jit.freeze made have no mode.
    modules = [m for m in module.modules() if hasattr(m, "training")]
    flags = [m.training for m in modules]
    buffers = [(m, name, b, b.clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_float32_matmul_precision("highest")
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.mha.set_fastpath_enabled(False)
            if any(flags):
                module.eval()
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = convolutions
            torch.backends.mha.set_fastpath_enabled(fast)
            for m, was in zip(modules, flags, strict=True):
                # Parents first: ``train`` also sets the flags of what is inside.
                if m.training != was:
                    m.train(was)
            with torch.no_grad():
                for m, name, buffer, copy in buffers:
                    m._buffers[name] = buffer
                    if not torch.equal(buffer, copy):
                        buffer.copy_(copy)
