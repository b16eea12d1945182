"""Generators of parts of the documentation. None of them is a part of the site.

- `hooks`: what mkdocs calls while it builds the site.
- `command_line`: the reference of the command line.
- `providers`: the table of providers in docs/providers.md and README.md.
"""
