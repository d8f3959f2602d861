"""Imported last by the server that ranks are forked from: what has been imported is no garbage, and none looks for any.

Without it each full collection in a rank walks over a million objects, and copies the memory that they lie in.
"""

import gc

gc.collect()
gc.freeze()
