"""The command ``certify`` as the only one of its process."""

import sys
from functools import partial

from verifiable_relu import certify

main = partial(certify.main, alone=True)

if __name__ == "__main__":
    sys.exit(main())
