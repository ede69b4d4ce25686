"""The command line: one file per verb; it uses the public names of spformat only."""
