"""Linear maps between flat vectors: the weights of a network in the layouts in which networks have them.

    conv = Convolution(weight, in_shape=(3, 32, 32), stride=(2, 2))
    y = conv.apply(x)           # W·x,   (batch, n_out) from (batch, n_in)
    a = conv.transpose(rows)    # Wᵀ·a,  (rows, n_in) from (rows, n_out): one step of backward propagation
    r = conv.abs_apply(radius)  # |W|·r: one step of interval propagation

A map knows its products and the length of its sums; rounding follows from these by ``rounding.gamma``. It knows nothing
of bounds. Every product is a plain sum of products in the dtype of the argument, in some order: convolutions that a
library may transform (Winograd, FFT) are computed as matrix products.

``weight`` stays as it was given. What products need of it is converted once for each dtype and device.
"""

from __future__ import annotations

import copy
import math
import platform
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from verifiable_relu.rounding import tiny

Image = tuple[int, int, int]
"""Channels, height, width."""


class TensorCache:
    """Cache of tensors by key, for tensors whose sources never change."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Tensor] = {}

    def __call__(self, key: Hashable, make: Callable[[], Tensor], keep: bool = True) -> Tensor:
        """Return the tensor of a key; ``keep`` it for later unless it is part of a gradient."""
        found = self._made.get(key)
        if found is None:
            # A tensor made in inference mode could not take part in a gradient later.
            with torch.inference_mode(False):
                found = make()
            if keep:
                self._made[key] = found
        return found


class LinearMap(ABC):
    """y = W·x.

    Attributes:
        weight: the stored numbers that W is made of, in the dtype of the file.
        n_in, n_out: sizes of x and y.
        terms: the largest number of products that one output of ``apply`` sums; 0 where nothing is rounded.
        back_terms: the largest number of products that one output of ``transpose`` sums; 0 where nothing is rounded.
    """

    weight: Tensor
    n_in: int
    n_out: int
    terms: int
    back_terms: int

    def __init__(self) -> None:
        self._cache = TensorCache()

    def apply(self, x: Tensor) -> Tensor:
        """Return W·x, (batch, n_out), in the dtype of x, for x (batch, n_in)."""
        return self._times(x, "W")

    def abs_apply(self, x: Tensor) -> Tensor:
        """Return |W|·x, (batch, n_out), for x (batch, n_in)."""
        return self._times(x, "|W|")

    def transpose(self, a: Tensor) -> Tensor:
        """Return Wᵀ·a, (rows, n_in), in the dtype of a, for rows a (rows, n_out)."""
        return self._times(a, "Wᵀ")

    def _times(self, x: Tensor, which: str) -> Tensor:
        """Return the product of x (batch, n) with W, |W| or Wᵀ from ``entries`` in compressed columns."""

        def make() -> Tensor:
            outputs, inputs, values = self.entries()
            size = (self.n_in, self.n_out)
            if which == "Wᵀ":
                outputs, inputs, size = inputs, outputs, size[::-1]
            order = torch.argsort(outputs, stable=True)
            starts = torch.zeros(size[1] + 1, dtype=torch.long)
            starts[1:] = torch.bincount(outputs, minlength=size[1]).cumsum(0)
            values = (values.abs() if which == "|W|" else values)[order]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Sparse CS[CR] tensor support", category=UserWarning)
                return torch.sparse_csc_tensor(
                    starts, inputs[order], values.to(x.dtype), size, device=x.device, check_invariants=False
                )

        # With compressed rows, or in the other order, torch would copy the matrix, or x and the product.
        return x @ self.cached((which, x.dtype, x.device), make)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of W with these numbers, dense: (count, n_in), on the device of ``index``."""
        unit = torch.zeros(len(index), self.n_out, dtype=dtype, device=index.device)
        return self.transpose(unit.scatter_(1, index[:, None], 1.0))

    @abstractmethod
    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return the product of other weights in this layout with one sample, (n_out,), in numpy.

        Args:
            weight: of the shape of ``self.weight``: its numbers as integers, say, or their sizes.
            x: (n_in,), of the same kind of number.
        """

    @abstractmethod
    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the row numbers, column numbers and weights (count,) of the entries of W that are not 0."""

    layout: tuple[str, ...] = ()
    """The attributes other than ``weight`` that define W where they are not None."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """Return everything but ``weight`` that defines W, by name, for digests."""
        return {name: value for name in self.layout if (value := getattr(self, name)) is not None}

    def with_weight(self, weight: Tensor) -> LinearMap:
        """Return the map of other numbers in the same layout."""
        found = copy.copy(self)
        found.weight, found._cache = weight, TensorCache()
        return found

    def conversion_error(self, dtype: torch.dtype) -> float:
        """Return the largest relative error of weights in another dtype: infinite if one is lost."""

        def find() -> Tensor:
            narrow = self.weight.detach().to(dtype)
            known = (self.weight == 0) | ((narrow.abs() >= tiny(dtype)) & narrow.isfinite())
            if not bool(known.all()):
                return torch.tensor(math.inf, device="cpu")
            exact = self.weight.detach().double()
            return ((narrow.double() - exact).abs() / torch.where(exact == 0, 1.0, exact.abs())).max().cpu()

        return float(self.cached(("conversion error", dtype), find))

    def cached(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return a tensor made from the weights, computed once for each ``key``."""
        return self._cache(key, make, not self.weight.requires_grad)

    def weight_in(self, dtype: torch.dtype, device: torch.device, sizes: bool = False) -> Tensor:
        """Return the weights, or their ``sizes``, in a dtype on a device."""
        return self.cached(
            (sizes, dtype, device), lambda: (self.weight.abs() if sizes else self.weight).to(device, dtype)
        )


SPARSE_SHARE = 1 / 32
"""A matrix is multiplied in compressed rows where at most this share of its weights is not 0 ..."""

SPARSE_WEIGHTS = 1 << 14
"""... from this number of weights on: the networks of tllverifybench take less than half the time."""


class Dense(LinearMap):
    """One matrix, applied to each of ``copies`` parts of x.

    Args:
        weight: (out, in).
        copies: x is (batch, copies·in), y is (batch, copies·out).
    """

    layout = ("copies",)

    def __init__(self, weight: Tensor, copies: int = 1) -> None:
        super().__init__()
        self.weight, self.copies = weight, copies
        self.back_terms, self.terms = weight.shape
        self.n_out, self.n_in = copies * self.back_terms, copies * self.terms
        few = copies == 1 and weight.numel() >= SPARSE_WEIGHTS and not weight.requires_grad
        self.is_sparse = few and int(weight.count_nonzero()) <= SPARSE_SHARE * weight.numel()

    def _times(self, x: Tensor, which: str) -> Tensor:
        if self.is_sparse:
            return super()._times(x, which)
        matrix = self.weight_in(x.dtype, x.device, which == "|W|")
        matrix = matrix if which == "Wᵀ" else matrix.T
        return x @ matrix if self.copies == 1 else (x.unflatten(1, (self.copies, -1)) @ matrix).flatten(1)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return super().rows(index, dtype) if self.copies > 1 else self.weight_in(dtype, index.device)[index]

    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        return (x.reshape(self.copies, -1) @ weight.T).reshape(-1)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        # numpy finds them several times as fast as torch.
        row, column = (torch.from_numpy(place) for place in np.nonzero(self.weight.detach().cpu().numpy()))
        copy = torch.arange(self.copies).repeat_interleave(len(row))
        out, inner = self.weight.shape
        rows, columns = copy * out + row.repeat(self.copies), copy * inner + column.repeat(self.copies)
        return rows, columns, self.weight.detach().cpu()[row, column].repeat(self.copies)


class Diagonal(LinearMap):
    """y = weight·x, element by element.

    Args:
        weight: (n,).
        divisor: (n,); the map is exactly x/divisor then, and ``weight`` holds the nearest reciprocals.
    """

    layout = ("divisor",)

    def __init__(self, weight: Tensor, divisor: Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.divisor = weight, divisor
        self.n_in = self.n_out = len(weight)
        self.terms = self.back_terms = int(bool((weight.abs() != 1).any()))

    def _times(self, x: Tensor, which: str) -> Tensor:
        return x * self.weight_in(x.dtype, x.device, which == "|W|")

    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        return weight * x

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.weight.detach().cpu()
        place = weight.nonzero()[:, 0]
        return place, place, weight[place]


class Gather(LinearMap):
    """y[i] = x[index[i]]: permutation, slice, padding, repetition. Nothing is rounded.

    Args:
        index: (n_out,) numbers of elements of x; −1 where y is 0.
        n_in: the size of x.
    """

    layout = ("index", "n_in")

    def __init__(self, index: Tensor, n_in: int) -> None:
        super().__init__()
        self.index, self.n_in, self.n_out = index, n_in, len(index)
        self.weight = torch.ones(1)
        uses = torch.bincount(index[index >= 0], minlength=n_in)
        most = int(uses.max())
        self.terms, self.back_terms = 0, most if most > 1 else 0
        # Without repetition the transpose is a gather, too.
        self._inverse = torch.full((n_in,), -1)
        self._inverse[index[index >= 0]] = (index >= 0).nonzero()[:, 0]
        self._has_gaps = {"index": bool((index < 0).any()), "inverse": bool((self._inverse < 0).any())}

    def _times(self, x: Tensor, which: str) -> Tensor:
        if which == "Wᵀ" and self.back_terms:
            return super()._times(x, which)
        index, name = (self._inverse, "inverse") if which == "Wᵀ" else (self.index, "index")
        found = x.index_select(1, self.cached((name, x.device), lambda: index.clamp(min=0).to(x.device)))
        if not self._has_gaps[name]:
            return found
        # Not by a product: infinity times 0 is NaN.
        return found.masked_fill(self.cached((name, "none", x.device), lambda: (index < 0).to(x.device)), 0.0)

    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        # The number −1 is that of the last element: a zero of the same kind.
        return weight * np.concatenate([x, np.zeros(1, x.dtype)])[self.index.numpy()]

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = (self.index >= 0).nonzero()[:, 0]
        return rows, self.index[rows], self.weight.expand(len(rows))


class Sparse(LinearMap):
    """y[i] = Σ_k weight[i, k]·x[index[i, k]].

    Args:
        index: (n_out, terms) numbers of elements of x.
        weight: (n_out, terms); 0 where an output has fewer terms.
        n_in: the size of x.
    """

    layout = ("index", "n_in")

    def __init__(self, index: Tensor, weight: Tensor, n_in: int) -> None:
        super().__init__()
        self.index, self.weight, self.n_in = index, weight, n_in
        self.n_out, self.terms = index.shape
        uses = torch.bincount(index[(weight != 0).to(index.device)], minlength=1)
        self.back_terms = int(uses.max())

    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = (weight * x[self.index.numpy()]).sum(axis=1)
        return found

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        weight = self.weight.detach().cpu()
        rows, term = weight.nonzero(as_tuple=True)
        return rows, self.index[rows, term], weight[rows, term]


PATCH_ENTRIES = 1 << 24
"""Entries of the matrices of windows that a convolution by matrix products holds at once; one sample may have more."""

SUMS_FLOAT32_DIRECTLY = platform.machine() in ("x86_64", "AMD64")
"""Whether oneDNN, which computes float32 convolutions on processors for torch, is known to sum directly."""


def _sums_directly(x: Tensor) -> bool:
    """Return True if torch's convolutions of x are plain sums: a device's library may transform them."""
    return x.device.type == "cpu" and (SUMS_FLOAT32_DIRECTLY or x.dtype == torch.float64)


class Convolution(LinearMap):
    """Two-dimensional convolution (cross-correlation, as in ONNX and torch) of images in row-major order.

    Args:
        weight: (out, in/groups, kernel height, kernel width).
        in_shape: of the input image.
        stride, dilation: down and across.
        padding: zeros at the top, left, bottom and right.
        groups: of channels.

    Attributes:
        out_shape: of the output image.
    """

    layout = ("in_shape", "stride", "padding", "dilation", "groups")

    def __init__(
        self,
        weight: Tensor,
        in_shape: Image,
        stride: tuple[int, int] = (1, 1),
        padding: tuple[int, int, int, int] = (0, 0, 0, 0),
        dilation: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__()
        self.weight, self.in_shape, self.stride = weight, in_shape, stride
        self.padding, self.dilation, self.groups = padding, dilation, groups
        out, each, *kernel = weight.shape
        top, left, bottom, right = padding
        self._padded = (in_shape[1] + top + bottom, in_shape[2] + left + right)
        height, width = (
            (n - d * (k - 1) - 1) // s + 1 for n, s, d, k in zip(self._padded, stride, dilation, kernel, strict=True)
        )
        self.out_shape = (out, height, width)
        self.n_in, self.n_out = math.prod(in_shape), math.prod(self.out_shape)
        self.terms = each * math.prod(kernel)
        # A pixel meets every kernel entry of the same phase: one of s/gcd(s, d) along an axis.
        met = (-(-k // (s // math.gcd(s, d))) for k, s, d in zip(kernel, stride, dilation, strict=True))
        self.back_terms = out // groups * math.prod(met)

    def _times(self, x: Tensor, which: str) -> Tensor:
        weight = self.weight_in(x.dtype, x.device, which == "|W|")
        top, left, bottom, right = self.padding
        image = x.reshape(len(x), *self.in_shape)
        if _sums_directly(x) and (top, left) == (bottom, right):
            return F.conv2d(image, weight, None, self.stride, (top, left), self.dilation, self.groups).flatten(1)
        image = F.pad(image, (left, right, top, bottom))
        if _sums_directly(x):
            return F.conv2d(image, weight, None, self.stride, 0, self.dilation, self.groups).flatten(1)
        kernels, parts = weight.reshape(self.groups, -1, self.terms), []
        for part in image.split(self._at_once(self.groups * self.terms)):
            columns = F.unfold(part, **self._window).unflatten(1, (self.groups, self.terms))
            parts.append((kernels @ columns).flatten(1))
        return torch.cat(parts)

    def transpose(self, a: Tensor) -> Tensor:
        top, left, _, _ = self.padding
        image = self.transpose_images(a.reshape(len(a), *self.out_shape), self._padded)
        return image[:, :, top : top + self.in_shape[1], left : left + self.in_shape[2]].flatten(1)

    def transpose_images(self, a: Tensor, size: tuple[int, int]) -> Tensor:
        """Return Wᵀ·a for a map of this kernel between images of other sizes.

        Args:
            a: (rows, out, height, width), of any height and width.
            size: of the padded input images, which reach at least as far as ``a`` sees.

        Returns:
            (rows, in, *size).
        """
        reach = [
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(a.shape[2:], self.stride, self.dilation, self.weight.shape[2:], strict=True)
        ]
        beyond = (size[0] - reach[0], size[1] - reach[1])
        if _sums_directly(a):
            plain = self.groups == 1 and self.dilation == (1, 1)
            if plain and a.dtype == torch.float32 and self.stride[0] == self.stride[1] > 1:
                return self._subpixels(a, size)
            weight = self.weight_in(a.dtype, a.device)
            return F.conv_transpose2d(a, weight, None, self.stride, 0, beyond, self.groups, self.dilation)
        kernels, parts = self.weight_in(a.dtype, a.device).reshape(self.groups, -1, self.terms).transpose(1, 2), []
        for part in a.split(self._at_once(self.groups * self.terms, math.prod(a.shape[2:]))):
            columns = kernels @ part.flatten(2).unflatten(1, (self.groups, kernels.shape[2]))
            parts.append(F.fold(columns.flatten(1, 2), (reach[0], reach[1]), **self._window))
        return F.pad(torch.cat(parts), (0, beyond[1], 0, beyond[0]))

    def _subpixels(self, a: Tensor, size: tuple[int, int]) -> Tensor:
        """``transpose_images`` as a convolution without stride, whose channels are the pixels of one stride.

        oneDNN takes several times as long for strided transposes. Source: Shi et al., arXiv 1609.05158.
        """
        s, (out, channels, *kernel) = self.stride[0], self.weight.shape
        high, wide = (-(-k // s) for k in kernel)

        def make() -> Tensor:
            padded = F.pad(self.weight, (0, wide * s - kernel[1], 0, high * s - kernel[0]))
            blocks = padded.reshape(out, channels, high, s, wide, s).permute(1, 3, 5, 0, 2, 4).flip(4, 5)
            return blocks.reshape(channels * s * s, out, high, wide).to(a)

        cells = F.conv2d(a, self.cached(("subpixels", a.dtype, a.device), make), None, 1, (high - 1, wide - 1))
        image = F.pixel_shuffle(cells, s)
        missing = (size[0] - image.shape[2], size[1] - image.shape[3])
        image = F.pad(image, (0, max(0, missing[1]), 0, max(0, missing[0]))) if max(missing) > 0 else image
        return image[:, :, : size[0], : size[1]]

    @property
    def _window(self) -> dict[str, tuple[int, int]]:
        height, width = self.weight.shape[2:]
        return {"kernel_size": (height, width), "dilation": self.dilation, "stride": self.stride}

    def _at_once(self, entries: int, points: int | None = None) -> int:
        """Return the number of samples multiplied at once; ``entries`` are those for each point of the output image."""
        return max(1, PATCH_ENTRIES // max(1, entries * (math.prod(self.out_shape[1:]) if points is None else points)))

    def _columns(self, index: Tensor) -> Tensor:
        """Return the numbers of the inputs that outputs (count,) see, in the kernels' order; n_in beyond the edges.

        Returns:
            (count, terms), int64.
        """
        (_, height, width), (_, each, *kernel) = self.in_shape, self.weight.shape
        channel, point = index // math.prod(self.out_shape[1:]), index % math.prod(self.out_shape[1:])
        first = point // self.out_shape[2] * self.stride[0], point % self.out_shape[2] * self.stride[1]
        y, x = (
            start[:, None] - before + step * torch.arange(size, device=index.device)
            for start, before, step, size in zip(first, self.padding, self.dilation, kernel, strict=False)
        )
        y, x = y[:, None, :, None], x[:, None, None, :]
        group = torch.div(channel, len(self.weight) // self.groups, rounding_mode="floor") * each
        plane = group[:, None] + torch.arange(each, device=index.device)
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        return torch.where(inside, (plane[:, :, None, None] * height + y) * width + x, self.n_in).flatten(1)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        weight = self.weight_in(dtype, index.device).flatten(1)
        kernels = weight[index // math.prod(self.out_shape[1:])]
        rows = kernels.new_zeros(len(index), self.n_in + 1)
        return rows.scatter_(1, self._columns(index), kernels)[:, :-1]

    def product(self, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
        top, left, _, _ = self.padding
        channels, height, width = self.in_shape
        # np.pad would fill an object array with 64-bit zeros, which overflow when they meet a long integer.
        padded = np.zeros((channels, *self._padded), dtype=x.dtype)
        padded[:, top : top + height, left : left + width] = x.reshape(self.in_shape)
        (rows, columns), (down, across) = weight.shape[2:], self.dilation
        windows = sliding_window_view(padded, (down * (rows - 1) + 1, across * (columns - 1) + 1), axis=(1, 2))
        windows = windows[:, :: self.stride[0], :: self.stride[1], ::down, ::across]
        grouped = windows.reshape(self.groups, -1, *windows.shape[1:])
        kernels = weight.reshape(self.groups, -1, self.terms)
        parts = [
            kernel @ np.moveaxis(part, (1, 2), (3, 4)).reshape(self.terms, -1)
            for part, kernel in zip(grouped, kernels, strict=True)
        ]
        return np.concatenate(parts).reshape(-1)

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.arange(self.n_out)
        columns = self._columns(index)
        kernels = self.weight.detach().cpu().flatten(1)[index // math.prod(self.out_shape[1:])]
        rows, term = ((columns < self.n_in) & (kernels != 0)).nonzero(as_tuple=True)
        return rows, columns[rows, term], kernels[rows, term]
