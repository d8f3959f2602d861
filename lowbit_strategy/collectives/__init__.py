"""Compressed collectives: exchanges of bytes between ranks, and where every element lives."""
