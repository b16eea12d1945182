"""Items down and items up, each only when the other side is ready for it. Needs nothing, costs nothing."""

from collections.abc import Iterator

import skypool as sky


@sky.compute
def primes(up_to: int) -> Iterator[int]:
    sieve = bytearray([1]) * (up_to + 1)
    for n in range(2, up_to + 1):
        if sieve[n]:
            yield n
            sieve[n * n :: n] = bytes(len(range(n * n, up_to + 1, n)))


@sky.compute
def longest_gap(numbers: Iterator[int]) -> tuple[int, int]:
    best, last = (0, 0), next(numbers)
    for number in numbers:
        best, last = max(best, (number - last, last)), number
    return best


if __name__ == "__main__":
    with sky.ComputePool(slots=2) as pool:
        for found, prime in enumerate(primes(200_000) >> pool, 1):  # arrives while the node still sieves
            if found % 5000 == 0:
                print(f"prime number {found:,} is {prime:,}")
        print("longest gap up to 10,000, and where:", longest_gap(primes.local(10_000)) >> pool)  # streams up
