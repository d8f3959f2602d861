"""Local steps: ranks train separately for a round, then an outer optimizer moves the anchor that they share."""

from lowbit_strategy.local_steps.interval import AdaComm as AdaComm
from lowbit_strategy.local_steps.interval import Quadratic as Quadratic
from lowbit_strategy.local_steps.interval import Seconds as Seconds
from lowbit_strategy.local_steps.interval import Stepwise as Stepwise
from lowbit_strategy.local_steps.published import OUTER_RULES as OUTER_RULES
from lowbit_strategy.local_steps.published import DiLoCo as DiLoCo
from lowbit_strategy.local_steps.published import EagerDiLoCo as EagerDiLoCo
from lowbit_strategy.local_steps.published import LocalSGD as LocalSGD
from lowbit_strategy.local_steps.published import OverlapLocalSGD as OverlapLocalSGD
from lowbit_strategy.local_steps.published import PostLocalSGD as PostLocalSGD
from lowbit_strategy.local_steps.published import SparseLoCo as SparseLoCo
from lowbit_strategy.local_steps.published import StreamingDiLoCo as StreamingDiLoCo
from lowbit_strategy.local_steps.published import as_outer as as_outer
from lowbit_strategy.local_steps.rule import OuterRule as OuterRule
