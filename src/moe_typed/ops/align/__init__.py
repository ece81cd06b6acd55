"""Sort routes by expert, each expert's padded to whole blocks."""
