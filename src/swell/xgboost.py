"""Elastic XGBoost (docs/xgboost.md).

import swell.xgboost

booster = swell.xgboost.train(params, load, num_boost_round=200)
"""

from __future__ import annotations

from swell.train.boosting import train

__all__ = ["train"]
