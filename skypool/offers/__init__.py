"""From what a user asks for to a ranked list of offers, each with its price. Nothing is rented here.

`need` checks what each node must have, `search` asks all providers, `price_cache` keeps their answers between runs,
`ranking` compares prices and decides the order, `plan` is `sky.plan`.
"""

__all__ = ["need", "plan", "price_cache", "ranking", "search"]
