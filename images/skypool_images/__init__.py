"""`Image`: packages, files, variables and commands for a node, and the script that sets up a machine."""

from __future__ import annotations

from skypool_images.errors import ImageError
from skypool_images.image import Image
from skypool_images.spec import Spec
from skypool_images.steps import Step, assemble

__all__ = ["Image", "ImageError", "Spec", "Step", "assemble"]
