"""The first product of an expert: gate and up at once, activated, and quantised for the second."""
