"""The decision picture of the page on local steps."""

from __future__ import annotations

from style import GRAY, GREEN, decisions

QUESTIONS = (
    ("Does a step wait for the\nnetwork with loco_ddp?", "no", "loco_ddp:\nthe same algorithm", GREEN),
    ("Would loco2 or loco1\nbe enough?", "yes", "loco2_ddp, loco1_ddp:\nthe same algorithm", GREEN),
    ("May a run of thousands of\nsteps end at another loss?", "no", "wait for the network", GRAY),
    ("Can a rank hold the model, or\na node, and 8 bytes more\nper parameter?", "no", "loco_hsdp", GREEN),
)

if __name__ == "__main__":
    decisions("outer", QUESTIONS, "diloco_ddp, diloco_hsdp:\nanother algorithm", height=6.6, weight="bold")
