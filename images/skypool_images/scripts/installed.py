"""Check that the packages (distributions) that the command line names are installed.

At the first package that is not installed, the program exits with status 1 and a message with the package's name.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution

for name in sys.argv[1:]:
    try:
        distribution(name)
    except PackageNotFoundError:
        sys.exit(name + " is not installed")
