"""Other ways than collectives by which messages travel between ranks."""
