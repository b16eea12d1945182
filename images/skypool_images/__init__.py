"""What the user wants on a node."""

from __future__ import annotations

from skypool_images.errors import ImageError
from skypool_images.image import Image
from skypool_images.spec import Spec
from skypool_images.steps import Step, assemble

__all__ = ["Image", "ImageError", "Spec", "Step", "assemble"]
