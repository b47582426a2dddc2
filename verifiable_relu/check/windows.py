"""Convolutions and maxima over sliding windows, as nodes of a graph."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy import sparse

from verifiable_relu.check.arithmetic import Number
from verifiable_relu.check.errors import BadInput
from verifiable_relu.check.graph import Activation, Affine, Maximum, pick
from verifiable_relu.check.tensors import LARGEST, Call, Tensor


def covered(call: Call, x: Tensor, kernel: list[int]) -> Number:
    """(channels, *places of the output, *kernel): the entries that each window covers, −1 in the padding."""
    rank, get = len(kernel), call.attributes.get
    if x.shape[0] != 1 or len(x.shape) != rank + 2:
        raise BadInput("one sample with channels is expected")
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
    view = sliding_window_view(padded, reach, axis=tuple(range(1, rank + 1)))
    steps = [slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation)]
    return view[tuple(steps)]


def convolution(call: Call) -> Tensor:
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
    size = call.build.nodes[x.node].size
    entries = (values[kept], (rows[kept], columns[kept]))
    matrix = sparse.csr_array(sparse.coo_array(entries, shape=(outputs * count, size)))
    bias = np.repeat(call.numbers(2) if call.given(2) else np.zeros(outputs), count)
    if len(bias) != outputs * count:
        raise BadInput("its inputs do not fit together")
    return call.affine(Tensor(x.node, np.arange(size)), matrix, bias, (1, outputs, *places))


def largest(call: Call) -> Tensor:
    """MaxPool: the largest entry of each window, in rounds of max(a, b) = a + relu(b − a); padding takes no part."""
    x, kernel = call.tensor(), call.attributes.get("kernel_shape") or []
    if call.attributes.get("ceil_mode", 0) or len(kernel) != len(x.shape) - 2 or min(kernel, default=0) < 1:
        raise BadInput("the windows are not known")
    windows = covered(call, x, kernel)
    shape = (1, *windows.shape[: 1 + len(kernel)])
    rivals = windows.reshape(int(np.prod(shape)), -1).T
    if not (rivals >= 0).any(0).all():
        raise BadInput("a window covers nothing but padding")
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
        z = build.computed(Affine([(node, sparse.csr_array(sparse.diags_array(met) @ ahead))], met - 1), met.shape)
        r = build.computed(Activation(z.node, np.zeros(len(met)), call.name, own=False), met.shape)
        gain = sparse.eye_array(stay.size, len(met), format="csr")
        terms = [(node, pick(np.maximum(stay, 0).ravel(), size)), (r.node, gain)]
        node = build.computed(Affine(terms, np.zeros(stay.size)), (stay.size,)).node
        rivals = np.where(stay >= 0, np.arange(stay.size).reshape(stay.shape), -1)
    if len(first_rivals) == 1:
        return Tensor(node, rivals[0].reshape(shape))
    made = build.computed(Affine([(node, pick(rivals[0], build.nodes[node].size))], np.zeros(rivals.shape[1])), shape)
    return build.computed(Maximum(x.node, made.node, first_rivals, call.name), shape)
