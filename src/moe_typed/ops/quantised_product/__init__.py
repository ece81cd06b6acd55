"""Grouped products over sorted routes that read weights as they are held, and decode them in registers."""
