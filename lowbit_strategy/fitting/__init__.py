"""`memory=`: plans the memory of compression, and fits it to what there is."""
