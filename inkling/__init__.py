"""Inkling with MTP speculative decoding on Triton Inference Server."""
