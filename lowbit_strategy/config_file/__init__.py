"""The `lowbit_config` section of Accelerate's configuration files, and its way to the training processes."""
