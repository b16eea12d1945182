"""A grid search over scikit-learn's digits, the pool used as an Executor. Needs scikit-learn, costs nothing."""

from concurrent.futures import Future, as_completed
from itertools import product
from typing import Any

from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.svm import SVC

import skypool as sky


def score(c: float, gamma: Any) -> float:
    x, y = load_digits(return_X_y=True)
    return float(cross_val_score(SVC(C=c, gamma=gamma), x, y, cv=3).mean())


if __name__ == "__main__":
    futures: dict[Future[float], tuple[float, float]] = {}
    with sky.ComputePool() as pool:
        for c, gamma in product([0.1, 1.0, 10.0], [0.0003, 0.001, 0.003]):
            futures[pool.submit(score, c, gamma)] = (c, gamma)
        for future in as_completed(futures):
            print("C={}, gamma={}: accuracy {:.4f}".format(*futures[future], future.result()))
    best = max(futures, key=lambda future: future.result())
    print("best: C={}, gamma={}, accuracy {:.4f}".format(*futures[best], best.result()))
