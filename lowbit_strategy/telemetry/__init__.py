"""What compression does to a run: observation, controllers at work, records, the start-up report."""
