"""Sum the weighted results of a row's routes."""
