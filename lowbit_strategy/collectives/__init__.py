"""Compressed collectives: exchanges of bytes between ranks, and the layout of parameters over ranks."""
