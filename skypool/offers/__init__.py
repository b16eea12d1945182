"""Needs, offers, prices and ranking: from a user's arguments to a ranked list of offers. No machine is rented here.

A need is what each machine must have; an offer is a machine type that a provider sells, with its place and price.

- `need`: checks the requirements for each node (accelerator, market, region, size).
- `search`: asks all providers at once; `price_cache`: keeps their answers between runs.
- `ranking`: makes the plan. `filters` rejects offers that do not meet the need, and `ordering` sorts the rest by price.
- `plan`: the function `sky.plan`.
"""

__all__ = ["filters", "need", "ordering", "plan", "price_cache", "ranking", "search"]
