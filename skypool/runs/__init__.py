"""Runs of programs that were not written for skypool: a script, a module or a command, with its project.

- `target`: what is run, as words of a command line.
- `node_folders`: where a node keeps projects, environments and output.
- `environment`: makes the Python environment of a project on a node.
- `node_program`: runs the program on a node, and writes its output to files there.
- `output_files`: the format of these files. `follow_end` sends them from a node, and `follow` reads them here.
- `run`: puts these together for the nodes of a pool.

The root of a project is its folder here. Its copy is its folder on a node.
"""

__all__ = ["environment", "follow", "follow_end", "node_folders", "node_program", "output_files", "run", "target"]
