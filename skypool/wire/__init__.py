"""What travels between a client and its nodes, and over what.

`frames` cuts a byte stream into messages, `codec` turns values and exceptions into bytes, `transport` starts the ssh
(or docker, or local) command that carries them. `keys` and `host_keys` are the SSH keys of a pool and of its
machines.
"""

__all__ = ["codec", "frames", "host_keys", "keys", "transport"]
