"""Sets up a booted machine until it is a node that is ready for calls.

- `node_setup`: prepares what each machine gets: the image's script, files, settings and secrets.
- `bootstrap`: connects to the machine, sends the script, files, settings and secrets, runs the script and follows its
  steps.
- `health_check`: compares the hardware that the node reports with the hardware that was bought.
"""

__all__ = ["bootstrap", "health_check", "node_setup"]
