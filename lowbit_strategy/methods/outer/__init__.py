"""Outer rules: ranks train separately for a round, then the outer optimizer moves the common anchor."""
