"""`lowbit doctor`: what this machine will use, and what a script would compress."""
