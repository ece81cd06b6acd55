"""The second product of an expert: activated rows to the places of their routes."""
