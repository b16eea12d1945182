"""Places in object stores, or folders, where what programs write is kept when their machines have ended.

- bucket: a named place in an object store, such as "s3://models". It has objects, each with a name and bytes.
- prefix: the beginning of the names of the objects that belong together, such as "runs/train-7".
- store: the connection to a bucket, as the library obstore makes it.
- unfinished upload: the parts of a large object that was never completed. They cost money until they are removed.

Modules:

- `bucket`: `Bucket`, a place and how it is reached, from its URL.
- `store`: opens a bucket with credentials of this computer, and reads the errors of object stores.
- `unfinished`: finds unfinished uploads, and removes them.
- `policies`: the policies and conditions that allow what saving needs below one prefix.
- `google`: buckets of Google Cloud Storage, and the requests to it that obstore cannot make.
- `temporary`: temporary credentials for one prefix, which the login of this computer makes.
- `downscoped`: makes these at Google.
- `bucket_check`: whether a bucket does what saving needs.
"""

__all__ = ["bucket", "bucket_check", "downscoped", "google", "policies", "store", "temporary", "unfinished"]
