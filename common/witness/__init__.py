"""Witnesses of ledgers: heads as checkpoints that others countersign, and proofs that newer ones keep older ones."""
