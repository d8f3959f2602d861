"""Replicas that join and leave, with local steps between meetings: an optional part."""

from lowbit_strategy.elastic.options import Elastic as Elastic
from lowbit_strategy.elastic.sampler import ElasticSampler as ElasticSampler
