"""Segmentation networks, the training loop that teachers and students share, and the files of a released network."""
