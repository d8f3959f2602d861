"""Rules for what a codec has not sent: error feedback, differences from an estimate, momentum."""
