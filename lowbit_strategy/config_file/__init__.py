"""The `lowbit_config` section of Accelerate's configuration files, and how it reaches the processes that train."""
