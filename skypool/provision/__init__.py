"""From a booted machine to a node that is ready.

- `node_setup`: builds what each machine gets: the image's script, files, settings and secrets.
- `agent_config`: what the agent on the machine is started with.
- `bootstrap`: connects to the machine, sends all of that, runs the script and follows its steps.
- `health_check`: compares the hardware that the node reports with the hardware that was bought.
"""

__all__ = ["agent_config", "bootstrap", "health_check", "node_setup"]
