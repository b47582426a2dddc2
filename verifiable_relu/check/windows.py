"""Convolutions, transposed ones too, maxima and means over sliding windows, as nodes of a graph."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import sparse

from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.functions import Kinked
from verifiable_relu.check.graph import Activation, Affine, Maximum, pick
from verifiable_relu.check.numbers import UNIT, Number
from verifiable_relu.check.tensors import Call, Tensor, spread


def _layout(call: Call, x: Tensor, kernel: list[int]) -> tuple[list[int], list[int], list[int], bytes]:
    """Strides, dilations, pads (those before, then those behind) and how the pads are given."""
    rank, mode = len(kernel), call.get("auto_pad", b"NOTSET")
    stride, dilation = call.get("strides", [1] * rank), call.get("dilations", [1] * rank)
    pads = call.get("pads", [0] * (2 * rank))
    fits = x.shape[:1] == (1,) and len(x.shape) == rank + 2 and min(kernel, default=0) >= 1
    BadInput.when(not fits, "one sample with channels, and a window of as many axes, are expected")
    lengths = [len(pads), len(stride), len(dilation)] == [2 * rank, rank, rank]
    BadInput.when(not lengths or min(pads) < 0 or min(stride + dilation) < 1, "the window is malformed")
    BadInput.when(call.get("kernel_shape", kernel) != kernel, "its inputs do not fit together")
    BadInput.when(mode == b"VALID" and any(pads), "the padding is not known")
    return stride, dilation, pads, mode


def _covered(call: Call, x: Tensor, kernel: list[int]) -> Number:
    """(channels, *places of the output, *kernel): the entries that each window covers, −1 in the padding.

    With ``ceil_mode`` the last windows may reach beyond the padding, where there is −2.
    """
    rank, sizes = len(kernel), x.shape[2:]
    stride, dilation, pads, mode = _layout(call, x, kernel)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        BadInput.when(max(dilation) > 1, "padding to the same size of a dilated window is not known")
        whole = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(sizes, stride, reach, strict=True)]
        first = [w // 2 if mode == b"SAME_UPPER" else w - w // 2 for w in whole]
        pads = first + [w - f for w, f in zip(whole, first, strict=True)]
    BadInput.when(mode not in (b"NOTSET", b"VALID", b"SAME_UPPER", b"SAME_LOWER"), "the padding is not known")
    spread([x.shape[1], *(n + sum(pads[i::rank]) for i, n in enumerate(sizes))])
    padded = np.pad(x.index[0], [(0, 0), *zip(pads[:rank], pads[rank:], strict=True)], constant_values=-1)
    if call.get("ceil_mode", 0):
        BadInput.when(mode != b"NOTSET", "ceil_mode with a padding that is not given is not known")
        beyond = []
        for n, size, before, step, span in zip(sizes, padded.shape[1:], pads, stride, reach, strict=False):
            last = -(-(size - span) // step) * step
            # A window that would begin in the padding behind the entries is left out.
            last -= step * (last >= before + n)
            beyond.append((0, max(0, last + span - size)))
        padded = np.pad(padded, [(0, 0), *beyond], constant_values=-2)
    view = sliding_window_view(padded, reach, axis=tuple(range(1, rank + 1)))
    steps = [slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation)]
    found = view[tuple(steps)]
    spread(found.shape)
    return found


def _weighted(call: Call, values: Number, rows: Number, columns: Number, shape: tuple[int, ...]) -> Tensor:
    """Products of weights, where row and column are not −1, added up, plus a bias for each channel of ``shape``."""
    outputs, count, x = shape[0], int(np.prod(shape[1:])), call.tensor()
    size = call.build.nodes[x.node].size
    kept = (columns >= 0) & (rows >= 0) & (values != 0)
    entries = values[kept], (rows[kept], columns[kept])
    matrix = sparse.csr_array(entries, shape=(outputs * count, size))
    bias = np.repeat(call.numbers(2) if call.given(2) else np.zeros(outputs), count)
    BadInput.when(len(bias) != outputs * count, "its inputs do not fit together")
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, (1, *shape))


def convolution(call: Call) -> Tensor:
    """Conv, as a sparse matrix."""
    x, weight, groups = call.tensor(), call.numbers(1), call.get("group", 1)
    outputs, per_group, *kernel = weight.shape
    windows = _covered(call, x, kernel)
    channels, places = windows.shape[0], windows.shape[1 : 1 + len(kernel)]
    fits = groups >= 1 and channels == per_group * groups and not outputs % groups
    BadInput.when(not fits, "its inputs do not fit together")
    count = int(np.prod(places))
    spread([count, weight.size])
    # (group, place, channel of the group and place of the kernel)
    columns: Number = windows.reshape(groups, per_group, count, -1).transpose(0, 2, 1, 3).reshape(groups, count, -1)
    columns = np.repeat(columns, outputs // groups, axis=0)
    values = np.broadcast_to(weight.reshape(outputs, 1, -1), columns.shape)
    rows = np.broadcast_to(np.arange(outputs * count).reshape(outputs, count, 1), columns.shape)
    return _weighted(call, values, rows, columns, (outputs, *places))


def transposed(call: Call) -> Tensor:
    """ConvTranspose, as a sparse matrix: entry i of a channel adds weight k to entry i·stride + k·dilation − pad."""
    x, weight, groups = call.tensor(), call.numbers(1), call.get("group", 1)
    channels, per_group, *kernel = weight.shape
    stride, dilation, pads, mode = _layout(call, x, kernel)
    sizes, rank, further = x.shape[2:], len(kernel), call.get("output_padding", [0] * len(kernel))
    fits = x.shape[1] == channels and groups >= 1 and not channels % groups
    BadInput.when(not fits or len(further) != rank or min(further) < 0, "its inputs do not fit together")
    known = mode in (b"NOTSET", b"VALID") and not call.get("output_shape", None)
    BadInput.when(not known, "a padding that is not given is not known")
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, stride, kernel, dilation, strict=True)]
    places = [r + m - a - b for r, m, a, b in zip(reach, further, pads[:rank], pads[rank:], strict=True)]
    BadInput.when(min(places) < 1, "its inputs do not fit together")
    outputs, count, across = per_group * groups, int(np.prod(places)), int(np.prod(sizes))
    spread([across, weight.size])
    spread([outputs, count])
    # (entries of a channel, places of the kernel): where a product goes among the places of an output, −1 if nowhere.
    target = np.zeros([1] * (2 * rank), np.int64)
    for axis, size in enumerate(places):
        at = np.arange(sizes[axis])[:, None] * stride[axis] + np.arange(kernel[axis]) * dilation[axis] - pads[axis]
        at = at.reshape([n if i in (axis, rank + axis) else 1 for i, n in enumerate((*sizes, *kernel))])
        target = np.where((target >= 0) & (at >= 0) & (at < size), target * size + at, -1)
    target = target.reshape(1, 1, across, -1)
    # (channels, outputs of the group, entries of a channel, places of the kernel)
    output = np.arange(channels)[:, None] // (channels // groups) * per_group + np.arange(per_group)
    rows = np.where(target >= 0, output[:, :, None, None] * count + target, -1)
    columns = np.broadcast_to(x.index.reshape(channels, 1, across, 1), rows.shape)
    values = np.broadcast_to(weight.reshape(channels, per_group, 1, -1), rows.shape)
    return _weighted(call, values, rows, columns, (outputs, *places))


def _pooled(call: Call, x: Tensor, kernel: list[int]) -> Number:
    """The entries that a pooling's windows cover; each covers one at least, and no padding is as wide as a window."""
    wide = any(pad >= size for pad, size in zip(call.get("pads", ()), 2 * kernel, strict=False))
    BadInput.when(wide, "a padding as wide as the window is not known")
    windows = _covered(call, x, kernel)
    full = (windows >= 0).any(tuple(range(1 + len(kernel), windows.ndim))).all()
    BadInput.when(not full, "a window covers nothing but padding")
    return windows


def means(call: Call, everywhere: bool = False) -> Tensor:
    """AveragePool: the mean of each window; with ``everywhere``, of each channel (GlobalAveragePool).

    The divisor is how many entries the window covers, with ``count_include_pad`` those of the padding included.
    """
    x = call.tensor()
    kernel = list(x.shape[2:]) if everywhere else call.get("kernel_shape", [])
    windows = _pooled(call, x, kernel)
    shape = windows.shape[: 1 + len(kernel)]
    cells = windows.reshape(int(np.prod(shape)), -1)
    counts = (cells >= (-1 if call.get("count_include_pad", 0) else 0)).sum(1)
    rows, places = np.nonzero(cells >= 0)
    size = call.build.nodes[x.node].size
    matrix = sparse.csr_array((1 / counts[rows], (rows, cells[rows, places])), shape=(len(cells), size))
    # The reciprocal of a power of two is exact.
    exact = bool((np.frexp(counts)[0] == 0.5).all())
    source = Tensor(x.node, np.arange(size))
    return call.affine(source, matrix, np.zeros(len(cells)), (1, *shape), 0.0 if exact else 2 * UNIT)


def largest(call: Call) -> Tensor:
    """MaxPool: the largest entry of each window; next to it rounds of max(a, b) = a + relu(b − a).

    In a round the first half of the rivals meets the last half; of an odd number the middle one meets itself.
    """
    x, kernel, build = call.tensor(), call.get("kernel_shape", []), call.build
    windows = _pooled(call, x, kernel)
    shape = (1, *windows.shape[: 1 + len(kernel)])
    cells = windows.reshape(int(np.prod(shape)), -1).T
    # Entries come first, and the first of them stands in the place of what is missing.
    cells = np.take_along_axis(cells, np.argsort(cells < 0, axis=0, kind="stable"), 0)
    rivals = every = np.where(cells >= 0, cells, cells[0])[(cells >= 0).any(1)]
    if len(rivals) == 1:
        return Tensor(x.node, rivals[0].reshape(shape))
    node = x.node
    while len(rivals) > 1:
        half = (len(rivals) + 1) // 2
        first, second = (pick(part, build.nodes[node].size) for part in (rivals[:half], rivals[-half:]))
        count = half * rivals.shape[1]
        gap = build.computed(Affine([(node, sparse.csr_array(second - first))], np.zeros(count)), (count,)).node
        relu = build.computed(Activation(gap, count, Kinked(np.zeros(count)), own=False), (count,)).node
        node = build.computed(Affine([(node, first), (relu, np.ones(count))], np.zeros(count)), (count,)).node
        rivals = np.arange(count).reshape(half, -1)
    return build.computed(Maximum(x.node, node, every), shape)
