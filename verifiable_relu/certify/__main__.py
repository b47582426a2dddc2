"""The command ``certify`` as ``python -m verifiable_relu.certify``."""

import sys

from verifiable_relu.certify import alone

if __name__ == "__main__":
    sys.exit(alone())
