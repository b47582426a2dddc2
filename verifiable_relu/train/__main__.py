"""Train a network with λ-GELU, anneal λ, replace the activation by ReLU, and write the network as ONNX."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verifiable_relu.command_line import Parser, guarded
from verifiable_relu.errors import InputError
from verifiable_relu.train.options import Options, add_options, flag, int8_file, require_outputs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = Parser(label="train", prog="verifiable-relu train", description=__doc__, allow_abbrev=False)
    add_options(made, Options, device="auto")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status (``command_line.guarded``). After Ctrl-C, the same command resumes."""
    values = vars(parser().parse_args(arguments))
    out, device, debug, int8 = (values.pop(name) for name in ("out", "device", "debug", "int8"))
    return guarded("train", lambda: run(Options(**values), out, device, int8), debug)


def run(options: Options, out: Path, device: str = "auto", int8: bool = False) -> int:
    """Train a network with a progress bar on stderr, and write it as ONNX with its record next to it.

    Returns the exit status: 0 when done, 130 after Ctrl-C. Raises an InputError for data, a device, an output path or a
    checkpoint that cannot be used.
    """
    saved = out.with_suffix(".checkpoint")
    require_outputs(out, int8, ".checkpoint", ".json")
    # Imported here, because the imports load torch, for which --help need not wait.
    from verifiable_relu.data import training_and_test
    from verifiable_relu.settings import find_device
    from verifiable_relu.train.export import export
    from verifiable_relu.train.loop import progress_bar, train

    where = find_device(device)
    training, test = training_and_test(options.data)
    if training.note:
        print(training.note, file=sys.stderr)
    steps = options.epochs * -(-len(training) // options.batch)
    with progress_bar(True, steps) as show:
        trained = resumable(saved, lambda: train(options, training, saved, lambda s: show(s.step, str(s)), test, where))
    if trained is None:
        return 130
    results = export(trained, options, training, test, out, int8)
    saved.unlink(missing_ok=True)
    _show(results)
    more = f", {int8_file(out)}" if int8 else ""
    print(f"wrote {out}{more} and {out.with_suffix('.json')}")
    return 0


def resumable(saved: Path, work: Callable[[], Any]) -> Any:
    """Return the result of a training; None after Ctrl-C, when a line on stderr says how to go on."""
    try:
        return work()
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes after the last complete epoch ({saved})", file=sys.stderr)
        return None
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):
            raise
        said = "the training does not fit into the memory: choose a smaller model or --batch"
        raise InputError(said, place=flag("model")) from None


def _show(results: Mapping[str, Any]) -> None:
    """Print the results in lines; fractions of all images are percentages."""
    flat = {**results, **{f"int8 {name}": value for name, value in results.get("int8", {}).items()}}
    flat.pop("int8", None)
    width = max(map(len, flat))
    for name, value in flat.items():
        is_fraction = name.startswith(("clean", "not_refuted", "int8 clean"))
        print(f"{name.replace('_', ' '):{width}}  {f'{value:.2%}' if is_fraction else _text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
