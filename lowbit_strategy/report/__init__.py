"""A run's record, and the page that shows it."""
