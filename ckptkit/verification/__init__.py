"""Prove that a checkpoint is right: files, weights, and the forward pass in both frameworks."""
