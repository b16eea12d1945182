"""Entry point of the command `skypool` and of `python -m skypool`."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line with the arguments of the process, and exit.

    Ctrl-C in this function, also while the command line is imported, ends the process without a traceback. The exit
    status is then 130.
    """
    try:
        from skypool import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
