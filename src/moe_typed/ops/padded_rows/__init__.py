"""Mark the rows of a routing that are padding, with the number of live rows read on the device."""
