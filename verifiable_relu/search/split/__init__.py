"""Branch and bound on the input box, complete in the limit, and quick where few inputs vary."""

from verifiable_relu.search.split.search import InputSplit

__all__ = ["InputSplit"]
