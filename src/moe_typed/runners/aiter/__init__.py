"""The AITER runner."""
