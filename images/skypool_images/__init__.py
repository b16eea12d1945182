"""`Image`: packages, files, variables and commands for a node, and the script that sets up a machine.

Words of this package:

- node: a rented machine of a pool.
- base image: the provider's image of an operating system from which a machine boots.
- place: a path on a node. Relative places are in the folder where calls run.
- glob: a pattern of paths, such as "src/**".
- secret: an environment variable whose value appears in no script, text or hash.
- runtime: a family of accelerators, such as "cuda".
- MIG profile: the size of one part of an NVIDIA card, such as "3g.40gb".
- spec: the checked fields of an image (`Spec`).
- step: one named part of the setup of a machine (`Step`).
- agent: skypool's process on the machine.
"""

from __future__ import annotations

from skypool_images.errors import ImageError
from skypool_images.field_checks import Spec
from skypool_images.image import Image
from skypool_images.script import Step, assemble

__all__ = ["Image", "ImageError", "Spec", "Step", "assemble"]
