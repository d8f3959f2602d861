"""What acts: a controller at work on one engine, and everything that a model has of controllers and monitors."""
