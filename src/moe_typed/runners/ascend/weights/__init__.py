"""Weights prepared for the Ascend NPU."""
