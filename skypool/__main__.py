"""Entry point of `python -m skypool`: runs skypool's command line."""

from skypool.cli import main

if __name__ == "__main__":
    main()
