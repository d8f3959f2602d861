"""`lowbit doctor`: reports what this machine will use, and what a script would compress."""
