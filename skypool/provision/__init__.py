"""From a machine that answers to a node that is ready.

`node_setup` collects what each machine gets (the image's script, files, settings and secrets), `bootstrap` runs it
there and reports each step, `health_check` compares the hardware found with the hardware bought.
"""

__all__ = ["bootstrap", "health_check", "node_setup"]
