"""The function ``verify``, the package's interface from Python: are images classified robustly?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from verifiable_relu.campaign import Case, Result, run
from verifiable_relu.campaign.inputs import believe, time_limit, verifier
from verifiable_relu.errors import InputError
from verifiable_relu.network import Network, from_torch, hardened, read_onnx
from verifiable_relu.spec import Query, linf_properties
from verifiable_relu.spec.balls import exact_number


def verify(
    model: nn.Module | Network | Path | str | bytes,
    images: np.ndarray | Tensor,
    labels: Sequence[int] | np.ndarray | Tensor,
    eps: Fraction | float,
    method: str = "auto",
    timeout: float = 60.0,
    clip: tuple[Fraction | float, Fraction | float] = (0, 1),
    device: str = "cpu",
    progress: bool = False,
    joint: float | Sequence[float] | bool = False,
    memory: int | None = None,
) -> list[Result]:
    """Decide for each image whether the model gives the image's label to every input in the L∞ ball around it.

    The ball of an image is the set of inputs x in which each pixel differs from the image's by at most ``eps`` and lies
    within ``clip``.

    Args:
        model: a torch module, which is read in evaluation mode; a ``Network``; or an ONNX file, by path or as bytes.
        images: (n, *input shape), in the units that the model takes; each number is taken exactly, bit for bit.
        labels: (n,), the true classes.
        eps: the radius, ≥ 0, in the same units; a ``Fraction`` such as ``Fraction(1, 255)`` stays exact. All numbers
            may be numpy scalars, or tensors without axes.
        method: the name of a verifier.
        timeout: seconds for each image.
        clip: the least and the greatest valid value of a pixel.
        device: the torch device on which bounds and attack run.
        progress: whether a progress bar is shown on stderr.
        joint: asks at once for the ReLU network and for all networks that have λ'-GELU with λ' ≥ λ in place of ReLU.
            The value is λ, one number for the network or one for each layer; True takes the λ of the model's own
            λ-GELUs (``network.hardened``), and False asks for the model alone.
        memory: the bytes that bounds may hold at once, approximately, for methods with such a limit; None leaves the
            method's own.

    Returns:
        One result per image, in the images' order. ``verdict`` is *unsat* where no input of the ball changes the class;
        *sat* where ``counterexample`` does (a tie of two outputs counts); otherwise *unknown*, for the reason in
        ``reason`` and ``detail``. For *unsat*, ``margin`` ≥ 0 is a proven lower bound, over the ball, of the difference
        between the label's output and the largest other one.

    Raises:
        InputError: (a ``ValueError``) for a bad model, shape, number, label, method or limit.
    """
    if not isinstance(method, str):
        raise InputError(f"a method is named by a string, not {method!r:.60}")
    if not isinstance(device, str | torch.device):
        raise InputError(f"a device is named by a string, not {device!r:.60}")
    limit = time_limit(float(exact_number(timeout, "the time limit")))
    chosen = verifier(method, str(device), memory)
    pixels = _pixels(images)
    network = _network(model, pixels.shape[1:])
    if not (isinstance(joint, bool | np.bool_) and not joint):
        network = hardened(network, _hardness(joint))
    if pixels.shape[1:] != network.input_shape:
        raise InputError(f"images of shape {pixels.shape[1:]}, but the network takes {network.input_shape}")
    if network.output_size < 2:
        raise InputError(f"the network has {network.output_size} output, but classes are compared")
    properties = linf_properties(pixels, _labels(labels), eps, network.output_size, clip)
    believe(network, properties)
    cases = [Case(network.name, f"image {i}", (Query(network, p),), limit) for i, p in enumerate(properties)]
    if not progress:
        return run(cases, chosen)
    # Imported here, because the bar alone needs the library rich.
    from verifiable_relu.campaign.console import Watcher

    with Watcher(len(cases)) as watcher:
        return run(cases, chosen, observer=watcher)


_EXACT_INTEGERS = 2**53
"""The largest integer up to which every integer is a float64 number."""


def _array(values: object, what: str) -> np.ndarray:
    """A tensor, an array or nested lists as a numpy array; a tensor's floating-point numbers are widened to float64.

    Raises:
        InputError: if the values are no array; the message calls them ``what``.
    """
    try:
        if isinstance(values, Tensor):
            held = values.detach().cpu()
            values = held.double() if held.is_floating_point() else held
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{what}: not an array of numbers: {error}") from None


def _pixels(images: np.ndarray | Tensor) -> np.ndarray:
    """The images as an array of finite float64 numbers, (n, *input shape).

    Raises:
        InputError: for anything but finite real numbers that float64 represents exactly.
    """
    array = _array(images, "images")
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise InputError(f"images of dtype {array.dtype} where real numbers of at most 64 bits are expected")
    if array.ndim < 2:
        raise InputError(f"images of shape {array.shape} where (n, *input shape) is expected")
    if array.dtype.kind in "iu" and array.size and max(-int(array.min()), int(array.max())) > _EXACT_INTEGERS:
        raise InputError("a pixel is an integer beyond 2^53, which is no float64 number")
    array = array.astype(np.float64)
    bad = np.argwhere(~np.isfinite(array))
    if len(bad):
        raise InputError("a pixel is NaN or infinite", place=f"image {bad[0][0]}")
    return array


def _labels(labels: Sequence[int] | np.ndarray | Tensor) -> np.ndarray:
    array = _array(labels, "labels")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"labels of shape {array.shape} and dtype {array.dtype} where n integers are expected")
    return array.clip(-1, 2**62).astype(np.int64)


def _hardness(joint: object) -> float | Sequence[float] | None:
    """The value of λ that the argument ``joint`` states: a number or one per layer; None if ``joint`` is True."""
    if isinstance(joint, bool | np.bool_):
        return None
    if isinstance(joint, str | bytes | Mapping | set):
        raise InputError(f"joint is {joint!r:.60}, neither a number, nor one for each layer, nor True or False")
    array = _array(joint, "joint")
    if array.dtype.kind not in "fiu" or array.ndim > 1:
        raise InputError(f"joint is {joint!r:.60}, neither a number, nor one for each layer, nor True or False")
    return [float(number) for number in array] if array.ndim else float(array)


def _network(model: nn.Module | Network | Path | str | bytes, shape: tuple[int, ...]) -> Network:
    match model:
        case Network():
            return model
        case nn.Module():
            traced = from_torch(model, shape, type(model).__name__)
            # Verification needs no gradients of the weights, and replay runs on the CPU whatever the device.
            nodes = tuple(node.map_tensors(lambda t: t.detach().cpu()) for node in traced.nodes)
            return Network(nodes, name=traced.name)
        case Path() | str() | bytes():
            return read_onnx(model)
    raise InputError(f"a model is a torch module, a Network or an ONNX file, not {type(model).__name__}")
