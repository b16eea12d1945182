"""Program that looks whether distributions are installed: it ends with the name of the first one that is not."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

for name in sys.argv[1:]:
    try:
        distribution(name)
    except PackageNotFoundError:
        sys.exit(name + " is not installed")
