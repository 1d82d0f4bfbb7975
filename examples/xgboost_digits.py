"""Boosted trees on hand-written digits: elastic XGBoost (docs/guides/xgboost.md).

python examples/xgboost_digits.py                       (alone)
swell run --workers 1:3 examples/xgboost_digits.py
swell submit examples/xgboost_digits.py --rounds 200
"""

import argparse
import time

import numpy as np
import xgboost as xgb
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import swell.xgboost

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=60)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--round-ms", type=float, default=0.0, help="extra time of a round, to watch resizes")
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images, test_images, labels, test_labels = train_test_split(images, labels, test_size=0.3, random_state=0)


def load(rank: int, size: int) -> xgb.DMatrix:
    """This worker's part of the data: every `size`-th image."""
    return xgb.DMatrix(images[rank::size], labels[rank::size], nthread=1)


def load_test(rank: int, size: int) -> xgb.DMatrix:
    """This worker's part of the test images; XGBoost adds the metrics of all parts up."""
    return xgb.DMatrix(test_images[rank::size], test_labels[rank::size], nthread=1)


def slowly(predictions: np.ndarray, data: xgb.DMatrix) -> tuple[str, float]:
    """The share of wrong answers, after a pause that makes the rounds long enough to watch."""
    time.sleep(args.round_ms / 1000)
    return "error", float((predictions.argmax(1) != data.get_label()).mean())


params = {
    "objective": "multi:softprob",
    "num_class": 10,
    "max_depth": 3,
    "eta": 0.2,
    "subsample": 0.8,
    "tree_method": "hist",
    "nthread": 1,
    "seed": args.seed,
}
booster = swell.xgboost.train(
    params, load, args.rounds, evals={"test": load_test}, custom_metric=slowly, verbose_eval=20
)
predictions = booster.predict(xgb.DMatrix(test_images, nthread=1))
chosen = np.clip(predictions[np.arange(len(test_labels)), test_labels], 1e-9, 1.0)
accuracy = (predictions.argmax(1) == test_labels).mean()
print(
    f"final accuracy {accuracy:.4f} loss {-np.log(chosen).mean():.4f} rounds {booster.num_boosted_rounds()}"
)
