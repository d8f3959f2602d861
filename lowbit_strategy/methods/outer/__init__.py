"""Outer rules: ranks train by themselves for a round, then the outer optimizer moves what they all go on from."""
