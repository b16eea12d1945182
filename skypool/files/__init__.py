"""Files and folders from this computer to nodes, and back: `pool.push` and `pool.pull`.

- `transfer`: starts both ends of a transfer, and begins again where a lost connection has stopped.
- `sending`, `receiving`: the two ends. `node_end`: the program that is the one on a node, begun by `node_loader`.
- `frames`: what they say to each other. `entries`: what is sent. `safe_writing`: writes them into a folder.
- `open_files`: finds the files that processes of a node are writing.
- `ignored`: what `.gitignore` and `.skypoolignore` leave out.
- `progress`: how far a transfer is.
- `project`: the folder that a script belongs to, and what of it is sent. `project_files`: what its files say.

Each transfer has a connection of its own, made as that to the agent: ssh, `docker exec` or a local program. Calls
and files do not wait for each other. A node gets the text of the modules first, so both ends are of one version.

The words of this package:

- entry: a file, folder or symbolic link that the sender has. The list: all entries, in the order of `entries.walk`.
- part: some of the list, in one frame.
- want: the answer to a part. It names the files that the receiver lacks, and how much of each an earlier transfer has
  left. It has the hashes of those that may be the same.
- hole: a part of a file that has no data on disk.
- sign of life: an empty frame of an end that works on something long.

The frames, in the order in which they come:

| frame | from | content |
|---|---|---|
| BEGIN | sender | the version, and the name of the file if only one comes |
| LIST | sender | a part of the list |
| WANT | receiver | the answer to one LIST or AGAIN |
| SAME | sender | the index of a file whose hash is the same |
| FILE, DATA, HOLE, DONE | sender | index and offset; data; the length of a hole; index, hash, and why it failed or "" |
| CHANGED | sender | the index of a file that has changed since it was listed |
| LISTED | sender | nothing: the list has ended |
| AGAIN | sender | entries of files that have changed |
| END | sender | nothing: all is sent |
| EXTRA | receiver | paths that it would delete |
| KEEP | sender | the indexes of those that it leaves out |
| END | receiver | what it has done |
| ALIVE | both | nothing: a sign of life |
| FAILED | both | why it cannot go on |

An index is the number of an entry in the list, with all entries that were listed again.
"""

__all__ = [
    "entries",
    "frames",
    "ignored",
    "node_end",
    "node_loader",
    "open_files",
    "progress",
    "project",
    "project_files",
    "receiving",
    "safe_writing",
    "sending",
    "transfer",
]  # fmt: skip
