"""Prepares a process for its forks when it is imported, after all other modules.

It makes the zip for nodes, so that no fork has to. What is there is frozen: a fork that looked through it for garbage
would copy all of its memory.
"""

import gc

from skypool.shipping import package_zip

package_zip.bundle()
gc.freeze()
