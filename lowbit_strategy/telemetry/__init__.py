"""What observes: figures of a step, records, the start-up report."""
