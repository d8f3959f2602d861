"""The session: what every framework's adapter calls to attach compression to a model and to run it."""
