"""``check_digest=``, an optional part: ranks compare values that should be the same on all of them."""

from lowbit_strategy.divergence.comparison import DivergenceError as DivergenceError
