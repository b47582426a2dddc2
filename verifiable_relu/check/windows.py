"""Convolutions, transposed ones too, maxima and means over sliding windows, as nodes of a graph."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import sparse

from verifiable_relu.check.arithmetic import UNIT, Number
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import ActivationNode, AffineNode, MaximumNode, pick
from verifiable_relu.check.tensors import LARGEST, OperatorCall, Tensor


def covered(call: OperatorCall, x: Tensor, kernel: list[int]) -> Number:
    """(channels, *places of the output, *kernel): the entries that each window covers, −1 in the padding.

    With ``ceil_mode`` the last windows may reach beyond the padding, where there is −2.
    """
    rank, get = len(kernel), call.attributes.get
    if x.shape[0] != 1 or len(x.shape) != rank + 2 or min(kernel, default=0) < 1:
        raise BadInput("one sample with channels, and a window of as many axes, are expected")
    stride, dilation = get("strides") or [1] * rank, get("dilations") or [1] * rank
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    pads = get("pads") or [0] * (2 * rank)
    mode = get("auto_pad", b"NOTSET")
    if mode in (b"SAME_UPPER", b"SAME_LOWER"):
        whole = [max((-(-n // s) - 1) * s + r - n, 0) for n, s, r in zip(x.shape[2:], stride, reach, strict=True)]
        first = [w // 2 if mode == b"SAME_UPPER" else w - w // 2 for w in whole]
        pads = first + [w - f for w, f in zip(whole, first, strict=True)]
        if max(dilation) > 1:
            raise BadInput("padding to the same size of a dilated window is not known")
    elif mode not in (b"NOTSET", b"VALID") or (mode == b"VALID" and any(pads)):
        raise BadInput("the padding is not known")
    sizes = [len(pads), len(stride), len(dilation)]
    if sizes != [2 * rank, rank, rank] or min(pads) < 0 or min(stride + dilation) < 1:
        raise BadInput("the window is malformed")
    if np.prod([n + sum(pads[i::rank]) for i, n in enumerate(x.shape[2:])], dtype=float) * x.shape[1] > LARGEST:
        raise BadInput("it is too large for this checker")
    widths = [(0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    padded = np.pad(x.index[0], widths, constant_values=-1)
    if get("ceil_mode", 0):
        if mode != b"NOTSET":
            raise BadInput("ceil_mode beside a padding that is not given is not known")
        beyond: list[tuple[int, int]] = []
        for size, first, step, span in zip(padded.shape[1:], pads[:rank], stride, reach, strict=True):
            last = -(-(size - span) // step) * step
            # A window that would begin in the padding behind the entries is left out.
            last -= step * (last >= first + x.shape[2 + len(beyond)])
            beyond.append((0, max(0, last + span - size)))
        padded = np.pad(padded, [(0, 0), *beyond], constant_values=-2)
    view = sliding_window_view(padded, reach, axis=tuple(range(1, rank + 1)))
    steps = [slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation)]
    found = view[tuple(steps)]
    if found.size > LARGEST:
        raise BadInput("it is too large for this checker")
    return found


def _weighted(
    call: OperatorCall, x: Tensor, entries: tuple[Number, tuple[Number, Number]], shape: tuple[int, ...]
) -> Tensor:
    """A sparse matrix of entries (values, (rows, columns)) times x, plus a bias for each channel of ``shape``."""
    outputs, count, size = shape[0], int(np.prod(shape[1:])), call.build.nodes[x.node].size
    matrix = sparse.csr_array(sparse.coo_array(entries, shape=(outputs * count, size)))
    bias = np.repeat(call.numbers(2) if call.given(2) else np.zeros(outputs), count)
    if len(bias) != outputs * count:
        raise BadInput("its inputs do not fit together")
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, (1, *shape))


def convolution(call: OperatorCall) -> Tensor:
    """Conv, as a sparse matrix."""
    x, weight, groups = call.tensor(), call.numbers(1), call.attributes.get("group", 1)
    outputs, per_group, *kernel = weight.shape
    windows = covered(call, x, kernel)
    channels, places = windows.shape[0], windows.shape[1 : 1 + len(kernel)]
    if channels != per_group * groups or outputs % groups or call.attributes.get("kernel_shape", kernel) != kernel:
        raise BadInput("its inputs do not fit together")
    count = int(np.prod(places))
    if count * weight.size > LARGEST:
        raise BadInput("the convolution is too large for this checker")
    # (group, place, channel of the group and place of the kernel)
    columns: Number = windows.reshape(groups, per_group, count, -1).transpose(0, 2, 1, 3).reshape(groups, count, -1)
    columns = np.repeat(columns, outputs // groups, axis=0).ravel()
    values = np.repeat(weight.reshape(outputs, 1, -1), count, axis=1).ravel()
    rows = np.repeat(np.arange(outputs * count), weight[0].size)
    kept = (columns >= 0) & (values != 0)
    return _weighted(call, x, (values[kept], (rows[kept], columns[kept])), (outputs, *places))


def transposed(call: OperatorCall) -> Tensor:
    """ConvTranspose, as a sparse matrix: entry i of a channel adds weight k to entry i·stride + k·dilation − pad."""
    x, weight, groups = call.tensor(), call.numbers(1), call.attributes.get("group", 1)
    channels, per_group, *kernel = weight.shape
    sizes, rank, get = x.shape[2:], len(kernel), call.attributes.get
    stride, dilation = get("strides") or [1] * rank, get("dilations") or [1] * rank
    further, pads = get("output_padding") or [0] * rank, get("pads") or [0] * (2 * rank)
    mode = get("auto_pad", b"NOTSET")
    if x.shape[:2] != (1, channels) or len(sizes) != rank or not rank or groups < 1 or channels % groups:
        raise BadInput("its inputs do not fit together")
    if get("output_shape") or mode not in (b"NOTSET", b"VALID") or (mode == b"VALID" and any(pads)):
        raise BadInput("a padding that is not given is not known")
    lengths = [len(pads), len(stride), len(dilation), len(further)]
    if lengths != [2 * rank, rank, rank, rank] or min(pads + further) < 0 or min(stride + dilation) < 1:
        raise BadInput("the window is malformed")
    if get("kernel_shape", kernel) != kernel:
        raise BadInput("its inputs do not fit together")
    places = [
        (n - 1) * s + (k - 1) * d + 1 + more - first - last
        for n, s, k, d, more, first, last in zip(
            sizes, stride, kernel, dilation, further, pads[:rank], pads[rank:], strict=True
        )
    ]
    if min(places) < 1:
        raise BadInput("it is empty")
    outputs, count, across = per_group * groups, int(np.prod(places)), int(np.prod(sizes))
    if max(across * weight.size, outputs * count) > LARGEST:
        raise BadInput("the convolution is too large for this checker")
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
    kept = (rows >= 0) & (values != 0)
    return _weighted(call, x, (values[kept], (rows[kept], columns[kept])), (outputs, *places))


def pooled(call: OperatorCall, x: Tensor, kernel: list[int]) -> Number:
    """What the windows of a pooling cover (``covered``); each covers an entry, no padding is as wide as a window."""
    if any(pad >= size for pad, size in zip(call.attributes.get("pads") or (), 2 * kernel, strict=False)):
        raise BadInput("a padding as wide as the window is not known")
    windows = covered(call, x, kernel)
    if not (windows >= 0).any(tuple(range(1 + len(kernel), windows.ndim))).all():
        raise BadInput("a window covers nothing but padding")
    return windows


def means(call: OperatorCall, everywhere: bool = False) -> Tensor:
    """AveragePool: the mean of each window; with ``everywhere``, of each channel (GlobalAveragePool).

    The divisor is how many entries the window covers, with ``count_include_pad`` those of the padding included.
    """
    x = call.tensor()
    kernel = list(x.shape[2:]) if everywhere else call.attributes.get("kernel_shape") or []
    windows = pooled(call, x, kernel)
    shape = windows.shape[: 1 + len(kernel)]
    cells = windows.reshape(int(np.prod(shape)), -1)
    counts = (cells >= (-1 if call.attributes.get("count_include_pad", 0) else 0)).sum(1)
    rows, places = np.nonzero(cells >= 0)
    size = call.build.nodes[x.node].size
    matrix = sparse.csr_array((1 / counts[rows], (rows, cells[rows, places])), shape=(len(cells), size))
    # The reciprocal of a power of two is exact.
    exact = bool((np.frexp(counts)[0] == 0.5).all())
    source = Tensor(x.node, np.arange(size))
    return call.affine(source, matrix, np.zeros(len(cells)), (1, *shape), 0.0 if exact else 2 * UNIT)


def largest(call: OperatorCall) -> Tensor:
    """MaxPool: the largest entry of each window, in rounds of max(a, b) = a + relu(b − a); padding takes no part."""
    x, kernel = call.tensor(), call.attributes.get("kernel_shape") or []
    windows = pooled(call, x, kernel)
    shape = (1, *windows.shape[: 1 + len(kernel)])
    rivals = windows.reshape(int(np.prod(shape)), -1).T
    # What is there comes first, so that whoever has no rival stays.
    rivals = np.take_along_axis(rivals, np.argsort(rivals < 0, axis=0, kind="stable"), 0)
    node, build, first_rivals = x.node, call.build, rivals
    while len(rivals) > 1:
        count = len(rivals) // 2 * 2
        first, second = rivals[0:count:2], rivals[1:count:2]
        stay = np.concatenate([first, rivals[count:]])
        met, size = (second >= 0).ravel().astype(float), build.nodes[node].size
        ahead = pick(np.maximum(second, 0).ravel(), size) - pick(np.maximum(first, 0).ravel(), size)
        # Where there is no rival, z is −1 and r is 0.
        z = build.computed(AffineNode([(node, sparse.csr_array(sparse.diags_array(met) @ ahead))], met - 1), met.shape)
        r = build.computed(ActivationNode(z.node, np.zeros(len(met)), call.name, own=False), met.shape)
        gain = sparse.eye_array(stay.size, len(met), format="csr")
        terms = [(node, pick(np.maximum(stay, 0).ravel(), size)), (r.node, gain)]
        node = build.computed(AffineNode(terms, np.zeros(stay.size)), (stay.size,)).node
        rivals = np.where(stay >= 0, np.arange(stay.size).reshape(stay.shape), -1)
    if len(first_rivals) == 1:
        return Tensor(node, rivals[0].reshape(shape))
    made = build.computed(
        AffineNode([(node, pick(rivals[0], build.nodes[node].size))], np.zeros(rivals.shape[1])), shape
    )
    return build.computed(MaximumNode(x.node, made.node, first_rivals, call.name), shape)
