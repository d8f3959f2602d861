"""The parts of the `lowbit` command: launching scripts, writing configuration files, checking a machine."""
