"""The segmentation network and the one training loop that teachers and the student share."""
