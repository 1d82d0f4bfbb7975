"""Elastic XGBoost (docs/guides/xgboost.md).

import swell.xgboost

booster = swell.xgboost.train(params, load, num_boost_round=200)
"""

from __future__ import annotations

try:
    from swell.train.boosting import train
except ModuleNotFoundError as error:
    from swell.extras import missing_extra

    raise missing_extra(error, "swell.xgboost") or error from None

__all__ = ["train"]
