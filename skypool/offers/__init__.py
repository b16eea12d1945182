"""From a user's arguments to a ranked list of offers with prices. Nothing is rented here.

- `need`: checks what each node must have (accelerator, market, region, size).
- `search`: asks all providers at once; `price_cache`: keeps their answers between runs.
- `ranking`: rejects offers that do not meet the need, compares prices, and sorts.
- `plan`: `sky.plan`.
"""

__all__ = ["need", "plan", "price_cache", "ranking", "search"]
