"""The top-k gate: router logits to expert ids and weights, every rule in one kernel."""
