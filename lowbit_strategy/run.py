"""Run an unmodified Accelerate or Hugging Face Trainer script with compressed gradients: `lowbit_strategy.launch.run`.

    python -m lowbit_strategy.run [--lowbit_config FILE] train.py --its-own-args

This module is the address that launchers and users type; the work is done in `lowbit_strategy.launch.run`.
"""

from lowbit_strategy.launch.run import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
