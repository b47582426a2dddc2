"""Every threshold of bound propagation in one value.

No threshold decides whether a bound is sound; each decides how fast it is computed, and some by how much rounding
widens it. The defaults were set with ``benchmarks/bounds_speed.py`` on a CPU. A test, or a device of another kind,
hands in a ``Tuning`` of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 1 << 30
"""Bytes of coefficients that a method may hold at once by default."""


@dataclass(frozen=True)
class Tuning:
    """When bound propagation takes which of two ways to the same bounds.

    Attributes:
        float32: whether coefficients and sums may be in float32 where rounding of float32 is accounted for.
        windows: whether rows of neurons of a convolution are kept in the window of the image that they see.
        restrict: whether rows leave out neurons of a ReLU that are inactive, in dense layers.

        chunk_bytes: bytes of coefficients propagated at once on a CPU: what stays in the cache goes faster.
        copies: arrays of a chunk's coefficients that are alive at once at the widest node.
        windowed_copies: the same for rows in windows, which take a part of the memory of whole rows.
        row_multiple: a chunk in float32 has a multiple of so many rows, since convolution libraries prepare anew for
            every number of rows.
        row_digits: binary digits of the number of rows in a group that may differ from 0, for the same reason.
        waiting_coefficients: from so many coefficients in a layer's rows on, the side of a neuron that is likely not to
            be needed waits for the other side.
        outputs_work: the output's rows are taken in float64 where the neurons' rows were so many times their work.

        active_share: rows are restricted to neurons that may be active up to this share of them.
        window_share: windows are used up to this share of the image's area.
        window_matrix_emptiness: how many times the kernel's area a window may have, for the convolution's adjoint on
            windows to be one matrix.
        window_matrix_entries: most entries of such a matrix.
        window_table_rows: where there are at most so many windows for each row, all windows are copied once in turn.

        float32_depth: terms that sums in float32 of the first convolutions may have together: these take most of the
            time and move bounds least, in the networks of the benchmark by at most 1e-4 of their width.
        float32_inputs: from so many inputs on the coefficients of the inputs alone are taken in float32 ...
        float32_neurons: ... behind a first dense layer of at most so many neurons.
        counted_terms: terms of a convolution's adjoint from which on those that are not zero are counted.

        interval_samples: from so many boxes on interval sums may be in float32.
        interval_products: products that a dense layer needs over all boxes for that.
        interval_terms: most terms of such a sum; 512 terms widen a radius by about 1e-5 of itself.
        interval_inputs: most inputs of such a layer.
        interval_widening: share of the radius by which sums in float32 of the centre may widen it, on average over the
            inputs of a box.

        sparse_share: a dense layer's weight is kept in compressed rows up to this share of weights that are not 0 ...
        sparse_weights: ... from so many weights on.
        sum_length: least numbers added one after another in a float32 sum of many: fewer take more time, more err more.
        weight_sum_length: the same in products with a weight matrix.
        sum_steps: from so many partial sums on they are themselves summed in two steps.
        channels_last: from so many output channels of a convolution on its adjoint goes by channels last.
        block_samples: from so many boxes on a float64 convolution may be a sum of matrix products, one for each block
            of the kernel ...
        block_terms: ... if each product sums so many terms ...
        block_count: ... and the kernel fills at most so many blocks, or ...
        block_bytes: ... the unfolded images of all boxes take more bytes than this.

        search_bytes: bytes that the search for slopes (α-CROWN) holds at once; more gain nothing.
        search_copies: arrays of every activation's size that the search holds for each row.
    """

    float32: bool = True
    windows: bool = True
    restrict: bool = True

    chunk_bytes: int = 1 << 24
    copies: float = 6
    windowed_copies: float = 2
    row_multiple: int = 8
    row_digits: int = 5
    waiting_coefficients: int = 1 << 18
    outputs_work: int = 64

    active_share: float = 0.75
    window_share: float = 0.5
    window_matrix_emptiness: int = 8
    window_matrix_entries: int = 1 << 22
    window_table_rows: int = 4

    float32_depth: int = 192
    float32_inputs: int = 256
    float32_neurons: int = 256
    counted_terms: int = 64

    interval_samples: int = 4
    interval_products: int = 1 << 21
    interval_terms: int = 512
    interval_inputs: int = 1 << 22
    interval_widening: float = 8e-5

    sparse_share: float = 1 / 32
    sparse_weights: int = 1 << 14
    sum_length: int = 96
    weight_sum_length: int = 48
    sum_steps: int = 16
    channels_last: int = 32
    block_samples: int = 16
    block_terms: int = 8
    block_count: int = 4
    block_bytes: int = 1 << 22

    search_bytes: int = 1 << 28
    search_copies: int = 13


TUNING = Tuning()
"""The defaults."""

PLAIN = Tuning(
    float32=False,
    windows=False,
    restrict=False,
    waiting_coefficients=1 << 62,
    sparse_weights=1 << 62,
    block_samples=1 << 62,
)
"""Without any acceleration."""
