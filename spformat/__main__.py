"""``python -m spformat``: the command, where its script is not on the path."""

from spformat_cli.main import main

main()
