"""Other projects' engines as clients: each integration imports its project alone, and only when it is used."""
