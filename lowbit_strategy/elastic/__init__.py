"""Replicas that join and leave, in local steps between them: a part that can be left out."""

from lowbit_strategy.elastic.options import Elastic as Elastic
from lowbit_strategy.elastic.sampler import ElasticSampler as ElasticSampler
