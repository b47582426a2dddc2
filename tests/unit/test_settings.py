"""Whatever a process has set for its own work, verdicts and margins are those of a fresh process."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.solver_cases import ball, mlp, row
from verifiable_relu import verify, verify_properties
from verifiable_relu.api import arguments
from verifiable_relu.ir.network import Network
from verifiable_relu.settings import default_settings
from verifiable_relu.spec.property import Property

Answer = tuple[str, str, float | None]


@contextmanager
def put(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """A block with a setting; at its end the setting must be what the block has set."""
    before = read()
    write(value)
    there = read()
    try:
        yield
        assert read() == there
    finally:
        write(before)


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
        assert np.float64(5e-324) * np.float64(1) == 0
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def raising() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        there = list(warnings.filters)
        yield
        assert list(warnings.filters) == there


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "floating-point errors raise": lambda: put(np.geterr, lambda value: np.seterr(**value), dict.fromkeys(
        ("divide", "over", "under", "invalid"), "raise")),
    "warnings raise": raising,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "products in less precision": lambda: put(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "convolutions in less precision": lambda: put(
        lambda: torch.backends.mkldnn.conv.fp32_precision,  # type: ignore[attr-defined]
        lambda value: setattr(torch.backends.mkldnn.conv, "fp32_precision", value), "bf16"),  # type: ignore[attr-defined]
    "float64 by default": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "float16 by default": lambda: put(torch.get_default_dtype, torch.set_default_dtype, torch.float16),
    "another device by default": lambda: put(torch.get_default_device, torch.set_default_device, "meta"),
    "within another device": lambda: torch.device("meta"),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic algorithms": lambda: put(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, "error"),
    "anomaly detection": lambda: put(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "smallest numbers are zero": flushing,
    "two threads": lambda: put(torch.get_num_threads, torch.set_num_threads, 2),
}  # fmt: skip


@cache
def question() -> tuple[Network, list[Property]]:
    """A network, and properties: one that bounds prove, one that takes splits, one that is violated."""
    rng = np.random.default_rng(5)
    network = mlp(rng, (3, 6, 6, 2))
    small, large = ball(np.zeros(3), 0.125), ball(np.zeros(3), 1.0)
    found = []
    for box, above in ((small, -0.125), (large, -0.125), (large, 100.0)):
        shares = np.concatenate([rng.random((2000, 3)), rng.integers(0, 2, (2000, 3))])
        outputs = network(torch.from_numpy(box.lower + shares * (box.upper - box.lower)))
        least = float((outputs[:, 0] - outputs[:, 1]).min())
        found.append(Property(box, ((row({0: 1, 1: -1}, round(least + above, 3)),),)))
    return network, found


@cache
def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()


def answered(method: str) -> list[Answer]:
    network, properties = question()
    results = verify_properties(network, properties, method=method, timeout=60)
    images = np.array([[0.1, 0.5, 0.2], [0.9, 0.4, 0.3]])
    results += verify(module(), images, [0, 1], 0.0625, method, 60)
    return [(result.answer, result.method, result.margin) for result in results]


@cache
def plain(method: str) -> list[Answer]:
    return answered(method)


@pytest.mark.parametrize("user", ["nothing", "older", "newer", "all", "different"])
def test_a_gpu_computes_convolutions_with_all_digits(user: str) -> None:
    cudnn: Any = torch.backends.cudnn
    parts = (torch.backends, cudnn, cudnn.conv, cudnn.rnn)
    fresh = [each.fp32_precision for each in parts]
    assert "tf32" in fresh
    try:
        if user == "older":
            cudnn.allow_tf32 = False
        for part in {"newer": parts[2:], "all": parts[:1], "different": parts[2:3]}.get(user, ()):
            part.fp32_precision = "tf32" if user == "all" else "ieee"
        before = [each.fp32_precision for each in parts]
        with default_settings():
            assert {each.fp32_precision for each in parts} == {"none"} and not cudnn.allow_tf32
        assert [each.fp32_precision for each in parts] == before
    finally:
        cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        for part, value in zip(parts, fresh, strict=True):
            part.fp32_precision = value


@pytest.mark.combined
@pytest.mark.parametrize("method", ["crown", "auto"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_process_changes_no_verdict_and_is_restored(setting: str, method: str) -> None:
    expected = plain(method)
    assert {answer for answer, _, _ in expected} >= ({"unsat", "sat"} if method == "auto" else {"unsat"})
    with SETTINGS[setting]():
        assert answered(method) == expected


def test_a_module_is_read_with_the_default_type_that_its_forward_relies_on() -> None:
    class Tenth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(2, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.one
            return torch.stack([x[:, 0] - torch.tensor(0.1), x[:, 1] * 0], 1)

    def at_tenth() -> float:
        with default_settings():
            network = arguments.network(Tenth(), (2,))
            return float(network(torch.tensor([[0.1, 0.0]], dtype=torch.float64))[0, 0])

    # 0.1 as a float32 number is larger than 0.1 as a float64 number, which the input is.
    assert at_tenth() == 0.1 - float(np.float32(0.1))
    with SETTINGS["float64 by default"]():
        assert at_tenth() == 0


def test_threads_that_overlap_restore_what_was_there_before_the_first() -> None:
    before = torch.get_default_dtype()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with default_settings():
            inside.set()
            leave.wait(60)

    with SETTINGS["float64 by default"]():
        other = threading.Thread(target=first)
        other.start()
        assert inside.wait(60)
        with default_settings():
            leave.set()
            other.join()
            # The first one has left, and the setting is still default_settings for this one.
            assert torch.get_default_dtype() == torch.float32
        with pytest.raises(ZeroDivisionError), default_settings():
            raise ZeroDivisionError
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == before


def sent(pipe: Any, method: str) -> None:
    try:
        pipe.send(answered(method))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux")
@pytest.mark.parametrize("daemon", [False, True])
def test_verdicts_in_threads_and_in_a_forked_process_are_the_same(daemon: bool) -> None:
    expected, found = plain("auto"), list[list[Answer]]()
    threads = [threading.Thread(target=lambda: found.append(answered("auto"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 2
    mine, theirs = multiprocessing.get_context("fork").Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=sent, args=(theirs, "auto"), daemon=daemon)
        process.start()
    assert mine.poll(120)
    assert mine.recv() == expected
    process.join()
