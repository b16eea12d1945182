"""Count the words of 1,000 files on four machines with CPUs. Needs an account at AWS; costs less than 1 USD an hour.

    python examples/14_many_files.py local

`local` is this machine and costs nothing. `skypool plan --nodes 4 --provider aws` says today's price.
"""

import re
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import skypool as sky


@sky.compute
def words(text: bytes) -> Counter[str]:
    return Counter(re.findall("[a-z]{4,}", text.decode(errors="replace").lower()))


if __name__ == "__main__":
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in library.rglob("*.py") if file.stat().st_size > 100][:1000]  # put your own files here
    total: Counter[str] = Counter()
    with sky.ComputePool(sys.argv[1:] or "aws", nodes=(1, 4), max_lifetime="1h") as pool:
        texts = (file.read_bytes() for file in files)  # the contents travel: the files are on this machine
        for counted in pool.map(words, texts, buffersize=100):
            total += counted
    print(f"{len(files):,} files, {total.total():,} words; most often: {', '.join(dict(total.most_common(5)))}")
