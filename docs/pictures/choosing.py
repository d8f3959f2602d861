"""The decision picture of the page on choosing a compressor."""

from __future__ import annotations

from style import GRAY, GREEN, decisions

QUESTIONS = (
    ("Does a step wait\nfor gradients?", "no", "the framework's\nown strategy", GRAY),
    ("Have you tried\nloco (4 bits)?", "no", "loco", GREEN),
    ("Do you still wait\nfor the network?", "no", "stay with loco", GREEN),
    ("Would fewer bits\nbe enough?", "yes", "loco2, then\nloco_ternary, loco1", GREEN),
    ("May a run of thousands of\nsteps end at another loss?", "yes", "local steps:\ndiloco_ddp", GREEN),
    ("May bits change\nduring the run?", "yes", "a controller:\nAccordion", GREEN),
)

if __name__ == "__main__":
    decisions("choosing", QUESTIONS, "topk, dgc, powersgd:\ncompare losses first", height=7.4)
