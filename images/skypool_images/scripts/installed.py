"""Program that checks if the distributions named by its arguments are installed.

It exits with status 1, and a message with the name, at the first one that is not installed.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

for name in sys.argv[1:]:
    try:
        distribution(name)
    except PackageNotFoundError:
        sys.exit(name + " is not installed")
