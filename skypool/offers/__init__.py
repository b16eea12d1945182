"""Needs, offers, prices and ranking: from a user's arguments to a ranked list of offers. No machine is rented here.

- `need`: checks the requirements for each node (accelerator, market, region, size).
- `search`: asks all providers at once; `price_cache`: keeps their answers between runs.
- `ranking`: rejects offers that do not meet the need, compares prices, and sorts.
- `plan`: the function `sky.plan`.
"""

__all__ = ["need", "plan", "price_cache", "ranking", "search"]
