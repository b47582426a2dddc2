"""The command ``python -m verifiable_relu.harden``. As an import, the name stands for the function ``harden``.

Without this, importing the command would hide the function ``verifiable_relu.harden``.
"""

import sys

if __name__ == "__main__":
    from verifiable_relu.hardening.command import main

    sys.exit(main())
else:
    from verifiable_relu.hardening import harden

    sys.modules[__name__] = harden  # type: ignore[assignment]
