"""Lists the objects of a place as the files of a folder of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skypool.data.fetching import above, is_plain
from skypool.data.folder_saver import Object
from skypool.data.local_files import OWN, trouble_with
from skypool.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ObjectStore


def wanted(store: ObjectStore) -> dict[str, Object]:
    """Return the objects of a store by the paths of their files: all but skypool's own, and marks for folders.

    Raises:
        UsageError: it has none, or one that cannot be a file of a folder.
        obstore.exceptions.BaseError, OSError: it cannot be listed.
    """
    import obstore

    found = {
        each["path"]: Object(each["path"], each["size"], each.get("e_tag"))
        for page in obstore.list(store)
        for each in page
        if not each["path"].startswith(f"{OWN}/")
    }
    for path in [*(above(found) & found.keys()), ""]:  # empty objects as many programs make them for folders
        if path in found and not found[path].size:
            del found[path]
    if wrong := next((path for path in found if not is_plain(path) or trouble_with(path)), None):
        raise UsageError(f"the object {wrong!r:.200} cannot be a file; rename it, or use another prefix")
    if both := sorted(above(found) & found.keys()):
        raise UsageError(f"{both[0]} is an object, and the beginning of others, so that it cannot be a file; rename it")
    if not found:
        raise UsageError("it has no objects; correct the prefix, or put them there")
    return found
