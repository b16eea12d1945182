"""`python -m skypool` is the command line."""

from skypool.cli import main

if __name__ == "__main__":
    main()
