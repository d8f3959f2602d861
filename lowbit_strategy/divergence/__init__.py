"""``check_digest=``: ranks compare what they should hold alike: a part that can be left out."""

from lowbit_strategy.divergence.comparison import DivergenceError as DivergenceError
