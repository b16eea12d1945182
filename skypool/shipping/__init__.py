"""Code on its way to a node: skypool itself (`bundle`) and the user's own modules (`user_modules`).

Nothing of skypool is installed on a node: the client sends what the agent needs when it connects.
"""

__all__ = ["bundle", "user_modules"]
