"""Options: the names and types that a configuration accepts, conversion, and hints in errors."""
