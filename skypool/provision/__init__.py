"""Sets up a booted machine until it is a node that is ready for calls.

- `image_project`: looks at the project that an image names.
- `setup_payload`: prepares what each machine gets: the image's script, files, settings and secrets.
- `bootstrap`: connects to the machine, sends all of this, runs the script and follows its steps.
- `health_check`: compares the hardware that the node reports with the hardware that was bought.

The words of this package:

- image: the packages, files and settings that the user asks for; see `skypool_images`.
- step: a part of the image's script, such as the installation of packages. The script reports its start and end.
- agent: skypool's main process on a node, which runs the calls.
- loader: the program at the other end of the connection that starts the agent.
- guard: the process on a machine that ends the machine when its lease is over.
- stream: a connection to stdin and stdout of a command on the machine.
"""

__all__ = ["bootstrap", "health_check", "image_project", "setup_payload"]
