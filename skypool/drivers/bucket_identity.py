"""`BucketIdentity`: an identity of machines that reaches one prefix of a bucket, which a driver may offer to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from skypool.buckets.bucket import Bucket


@dataclass(frozen=True, slots=True)
class BucketIdentity:
    """An identity that is not made yet, or again.

    Attributes:
        plan: what would be made, with its permissions, as lines of text for the user.
        use: how machines get the identity, as lines of text.
        removal: the commands that remove it.
        make: makes it, or what is missing of it, and sets its permissions again. Raises ProviderError or UsageError.
    """

    plan: str
    use: str
    removal: str
    make: Callable[[], None]


@runtime_checkable
class Identifies(Protocol):
    """An optional protocol of a driver: machines of the provider can have an identity that reaches a bucket."""

    @property
    def gives_identity(self) -> bool:
        """True if the settings of the driver name an identity for the machines that it rents."""
        ...

    @property
    def bucket_scheme(self) -> str:
        """The scheme of the buckets that such an identity reaches, such as "s3"."""
        ...

    def bucket_identity(self, bucket: Bucket) -> BucketIdentity:
        """Return the identity for the prefix of a bucket. Nothing is made.

        Raises ProviderError or UsageError if the account cannot be asked, or there is no such bucket.
        """
        ...
