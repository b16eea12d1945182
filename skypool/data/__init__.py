"""Folders of nodes that are kept in buckets, saved while programs write them, or filled from buckets before.

- save: to keep the files of a folder in a bucket while a program writes them.
- data: folders that are filled from buckets before anything runs, and are only read.
- mover: the process on a node that does both. It has libraries of its own, and takes no slot.
- finished file: one that no program has open for writing, and that has not changed for a while.
- snapshot: a copy of a file that stays open, under a name of its own.
- checkpoint: a folder with several files that are worth something only together. It is whole when all are there.
- journal: the file of a node in which it is noted what was saved or fetched.

Modules of the client:

- `save_asked`: checks what is to be saved, and whether its places can be used.
- `data_asked`: the same for data, and whether machines have room for it.
- `left_uploads`: notes the places of pools, and finds unfinished uploads that ended pools have left there.

For programs on nodes:

- `checkpoints`: `Checkpoints` and `saved`, which ask the mover.

Modules of the mover:

- `mover`: its main program. It obeys the agent, and tells it of each folder.
- `folder_saver`: saves one folder; `restoring`: brings it back before a program begins.
- `filled_folder`: fills one folder with data; `data_listing`: lists the objects that it gets.
- `fetching`: fetches objects into a folder; `checksums`: compares them with the checksums of a store.
- `checkpoint_saver`: keeps the checkpoints of `Checkpoints`, and decides from which one to go on.
- `node_login`: how a node logs in to a bucket.
- `objects`: requests about single objects.
- `progress`: how fast files are sent, since when others wait, and when to try again.
- `half_files`: remembers which files were being written when their programs were stopped.
- `local_files`: lists the files of a folder, and tells which are being written.
- `wholeness`: knows which folders are checkpoints, and when one is whole.
"""

__all__ = [
    "checkpoint_saver",
    "checkpoints",
    "checksums",
    "data_asked",
    "data_listing",
    "fetching",
    "filled_folder",
    "folder_saver",
    "half_files",
    "left_uploads",
    "local_files",
    "mover",
    "node_login",
    "objects",
    "progress",
    "restoring",
    "save_asked",
    "wholeness",
]
