"""Scales in other memory orders: row-major, column-major with aligned columns, packed four to a word, swizzled in tiles of 128 rows by 4 groups."""
