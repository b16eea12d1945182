"""What a driver of a cloud fulfils (`contract`), how drivers are found (`registry`), and what helps to write one.

Helpers: `asking` (retries, many requests at once, refusals as errors), `rest` (HTTP clouds), `regional` (clouds with
regions), `tags`, `userdata` (the boot script that ends a machine by itself), `ssh_machine` (access by SSH) and
`blocklist` (machines that failed lately).
"""

__all__ = ["asking", "blocklist", "contract", "regional", "registry", "rest", "ssh_machine", "tags", "userdata"]
