"""Entry point of `python -m skypool`: the command line."""

from skypool.cli import main

if __name__ == "__main__":
    main()
