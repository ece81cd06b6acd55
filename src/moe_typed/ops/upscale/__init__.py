"""Multiply quantised rows by their scales: the way back from ops/quantize."""
