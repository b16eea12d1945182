"""Needs, offers, prices and ranking: from a user's arguments to a ranked list of offers. No machine is rented here.

- `need`: checks the requirements for each node (accelerator, market, region, size).
- `search`: asks all providers at once; `price_cache`: keeps their answers between runs.
- `ranking`: makes the plan. `filters` rejects offers that do not meet the need; `sort_keys` sorts the others.
- `advice`: which requirement to drop if no offer meets the need; `offer_text`: offers in words.
- `plan`: the function `sky.plan`, which shows what a pool would rent.

The words of this package:

- need: what the user requires of each node.
- offer: a machine type that a provider sells, with its place and price.
- price cap: the highest price of a node that the user accepts.
- plan: the offers that meet a need, ranked, and the reasons against the others.
- market: "on-demand", or "spot" for machines that the provider may take back.
- slice: several machines that are rented together at one price, such as a TPU slice. It has one offer.
- driver: the object that talks to one provider.
- price table: prices that are shipped with a driver, for use when the provider does not report its own.
"""

__all__ = ["advice", "filters", "need", "offer_text", "plan", "price_cache", "ranking", "search", "sort_keys"]
