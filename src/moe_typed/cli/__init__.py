"""The command line: ``moe-typed plan``, ``run``, ``demo``, ``formats``, ``tune``."""
