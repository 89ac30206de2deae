"""Modules for the segmentation networks, the training loop that teachers and students share, and the student's
bundle.
"""
