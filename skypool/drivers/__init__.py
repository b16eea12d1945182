"""What a driver of a cloud fulfils (`contract`), how drivers are found (`registry`), and what helps to write one.

Helpers: `settings` (the settings of an account, checked), `retry` (many requests at once, and again), `refusals` (a
provider's error codes as errors of skypool), `preflight` (the questions of `skypool check`), `sdk` (SDKs, imported),
`rest` (HTTP clouds), `regional` (clouds with regions), `tags`, `userdata` (the boot script that ends a machine by
itself), `ssh_machine` (access by SSH), `transports` (access by other means) and `blocklist` (machines that failed
lately).
"""

__all__ = [
    "blocklist",
    "contract",
    "preflight",
    "refusals",
    "regional",
    "registry",
    "rest",
    "retry",
    "sdk",
    "settings",
    "ssh_machine",
    "tags",
    "transports",
    "userdata",
]
