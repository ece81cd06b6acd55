"""The hash gate: a token's experts are fixed by a table, its logits only weigh them."""
