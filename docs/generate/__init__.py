"""Generators of parts of the documentation. None of them is a part of the site.

- `hooks`: what mkdocs calls while it builds the site.
- `command_line`: the reference of the command line.
- `accelerators`: the type stubs of the accelerators, and docs/accelerators.md with the tables of `accelerator_tables`.
- `providers`: the table of providers in docs/providers.md and README.md.
"""
