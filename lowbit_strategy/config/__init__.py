"""Configuration files: the ``lowbit_config`` section, what it becomes, and the command that asks for it."""
